"""Evaluating published weights: the work of an evaluator's worker, what it finds, and what is saved of that."""

__all__ = ["evaluation_log", "evaluator_task", "model_checkpoints"]
