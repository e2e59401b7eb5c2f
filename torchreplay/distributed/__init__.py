"""Several learner ranks on one machine."""

__all__ = ["explorers", "learners"]
