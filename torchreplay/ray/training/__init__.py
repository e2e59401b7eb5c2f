"""Explorers, buffer, learner and evaluator in one object."""

__all__ = ["async_replay", "throughput"]
