"""Where things are, for programs that tests start."""

import os
from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent


def import_path(*directories: object) -> str:
    """A PYTHONPATH by which a program finds the package, these modules and those of more directories."""
    return os.pathsep.join(map(str, (ROOT, SUPPORT, *directories)))
