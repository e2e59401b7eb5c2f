"""The replay buffer of one machine: writing, sampling, feeding TD errors back."""
