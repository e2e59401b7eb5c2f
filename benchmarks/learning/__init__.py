"""Whether agents learn, and how fast: the same cells for every buffer, over several seeds.

python -m benchmarks learning --help
"""
