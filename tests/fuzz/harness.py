"""One target under libFuzzer: `harness.py TARGET [libFuzzer's arguments]`, in the environment that run.py makes."""

import importlib
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent))

with atheris.instrument_imports(include=["torchreplay"]):
    import torchreplay

target = importlib.import_module(sys.argv[1])
assert "sanitized" in torchreplay.__file__, "the fuzzers want the instrumented module"
atheris.Setup(sys.argv[1:], target.run)
atheris.Fuzz()
