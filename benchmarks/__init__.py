"""Measures torchreplay beside its peers in one run: ``python -m benchmarks``.

Every line of the table is measured by alternating short rounds between the candidates, so that a noisy machine slows
all of them alike. Ratios within a round are compared. See ``docs/benchmarks.md`` for what each line means.
"""
