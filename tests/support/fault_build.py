"""The native module built with fault points (`cpp/system/fault.h`), and an interpreter that runs the package with it.

`python tests/support/fault_build.py` only builds.
"""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import traceback

from paths import ROOT

TARGET = ROOT / "build" / "faults"


def build():
    """Compiles what has changed, and returns where the module is."""
    options = ["--quiet", "build_ext", "--build-lib", str(TARGET), "--build-temp", str(TARGET)]
    environment = {**os.environ, "TORCHREPLAY_FAULTS": "1"}
    subprocess.run([sys.executable, "setup.py", *options], cwd=ROOT, env=environment, check=True)
    return TARGET / "torchreplay" / "_C.abi3.so"


class FaultyInterpreter:
    """A process of its own in which `torchreplay` has fault points; what it runs may fork, and let its children die."""

    def __init__(self, module):
        self._module = module

    def __enter__(self):
        self._start()
        return self

    def __exit__(self, *_):
        self._end()

    def run(self, function, *args):
        """Returns what a function of a module returns there; an error is an `AssertionError` with its text here."""
        try:
            self._connection.send((function, args))
            result, error = self._connection.recv()
        except BaseException:  # the test has timed out: what hangs there must not hang the next one
            self._end()
            self._start()
            raise
        assert error is None, error
        return result

    def _start(self):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._module, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def _end(self):
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(module, connection):
    # Before anything imports the package, which then takes this module for its own.
    spec = importlib.util.spec_from_file_location("torchreplay._C", module)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            outcome = function(*args), None
        except BaseException:
            outcome = None, traceback.format_exc()
        connection.send(outcome)


if __name__ == "__main__":
    build()
