"""Builds the two native modules; everything else about the package is in pyproject.toml.

`torchreplay._C` is a CPython limited-API module (3.11). It reads tensors through DLPack and does not link torch.
`torchreplay._ops` registers torch operators through LibTorch's stable ABI (target 2.11). One `cp311-abi3` binary of
each serves every later Python and torch.

TORCHREPLAY_FAULTS=1 in the environment: `_C` alone, with the fault points of cpp/system/fault.h, for tests.
TORCHREPLAY_NATIVE=0: neither; the Makefile compiles in place, and wants no second compilation for `pip install -e`.
"""

import importlib.util
import os
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Floating point: no fused operations, so that every processor computes the same bits; and nobody looks at its exception
# flags, which would keep gcc from making vectors of conditional expressions.
FLOAT_ARGS = ["-ffp-contract=off", "-fno-trapping-math"]
COMPILE_ARGS = [
    *("-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall", "-Wextra"),
    *FLOAT_ARGS,
]

FAULTS = os.environ.get("TORCHREPLAY_FAULTS") == "1"
NATIVE = os.environ.get("TORCHREPLAY_NATIVE") != "0"


def torch_directory() -> Path:
    """The installed torch, found without the seconds that importing it takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(
            "torchreplay is built against the installed torch (>= 2.11), and this environment has none. Install torch "
            "and setuptools first, then build with: pip install --no-build-isolation torchreplay"
        )
    return Path(spec.origin).parent


class BuildAgainstTorch(build_ext):
    """Adds torch's headers and library when extensions are compiled, so that metadata needs no torch."""

    def build_extensions(self) -> None:
        torch = torch_directory()
        for extension in self.extensions:
            # -isystem: the warnings are for our own code.
            extension.extra_compile_args += ["-isystem", str(torch / "include")]
            if extension.name == "torchreplay._ops":
                extension.library_dirs.append(str(torch / "lib"))
        super().build_extensions()


CALLS = Extension(
    "torchreplay._C",
    sources=["cpp/python.cpp"],
    depends=["setup.py", *glob("cpp/*/*.h")],
    include_dirs=["cpp"],
    define_macros=[("Py_LIMITED_API", "0x030B0000"), *([("TORCHREPLAY_FAULTS", None)] if FAULTS else [])],
    extra_compile_args=[*COMPILE_ARGS, *(["-O1"] if FAULTS else [])],
    py_limited_api=True,
    language="c++",
)
OPERATORS = Extension(
    "torchreplay._ops",
    sources=["cpp/ops.cpp"],
    depends=["setup.py", *glob("cpp/*/*.h")],
    include_dirs=["cpp"],
    define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000")],
    extra_compile_args=list(COMPILE_ARGS),
    # Python loads torch's libraries privately: without this DT_NEEDED entry the operators find no symbols.
    # It needs no search path, since `import torch` has loaded the library by then.
    extra_link_args=["-Wl,--no-as-needed", "-ltorch_cpu"],
    py_limited_api=True,
    language="c++",
)

setup(
    ext_modules=[CALLS, *([] if FAULTS else [OPERATORS])] if NATIVE else [],
    cmdclass={"build_ext": BuildAgainstTorch},
    options={"build_ext": {"parallel": 2}, "bdist_wheel": {"py_limited_api": "cp311"}},
)
