"""Module weights from the learner to the explorers."""

__all__ = ["module_state", "shared_weights"]
