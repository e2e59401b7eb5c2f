"""Module weights from the learner to the explorers."""
