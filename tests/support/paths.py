"""Where things are, for programs that tests start."""

import os
from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent


def import_path(*more: str) -> str:
    """A PYTHONPATH by which a program finds the package, these modules, those of tests, and what else is named."""
    tests = sorted({path.parent for path in TESTS.rglob("test_*.py")})
    return os.pathsep.join(map(str, (ROOT, SUPPORT, *tests, *more)))
