"""Explorers, buffer, learner and evaluator in one object."""
