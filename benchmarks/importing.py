"""What an import costs after `import torch`: ``python -m benchmarks.importing --package NAME``.

In a process of its own. It prints one JSON number, milliseconds of processor time: a busy machine changes it little.
"""

import argparse
import json
import time
from importlib import import_module


def measure(package: str) -> float:
    """Returns the milliseconds that importing a package takes after torch."""
    import_module("torch")
    start = time.process_time()
    import_module(package)
    return 1e3 * (time.process_time() - start)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.importing", description=__doc__)
    parser.add_argument("--package", required=True)
    print(json.dumps(measure(parser.parse_args().package)))
