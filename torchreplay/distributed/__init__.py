"""Several learner ranks on one machine."""
