"""The evaluator: a worker that runs a user's function on published weights."""

__all__ = ["evaluator"]
