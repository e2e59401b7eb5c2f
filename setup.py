"""Builds the two native modules; everything else about the package is in pyproject.toml.

`torchreplay._C` is a CPython limited-API module (3.11). It reads tensors through DLPack and does not link torch.
`torchreplay._ops` registers torch operators through LibTorch's stable ABI (target 2.11). One `cp311-abi3` binary of
each serves every later Python and torch.

TORCHREPLAY_FAULTS=1 in the environment: `_C` alone, with the fault points of cpp/system/fault.h, for tests.
TORCHREPLAY_NATIVE=0: neither; the Makefile compiles in place, and wants no second compilation for `pip install -e`.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from glob import glob
from importlib.metadata import distributions
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

# Floating point: no fused operations, so that every processor computes the same bits; and nobody looks at its exception
# flags, which would keep gcc from making vectors of conditional expressions.
FLOAT_ARGS = ["-ffp-contract=off", "-fno-trapping-math"]
COMPILE_ARGS = [
    *("-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall", "-Wextra"),
    *FLOAT_ARGS,
]

FAULTS = os.environ.get("TORCHREPLAY_FAULTS") == "1"
NATIVE = os.environ.get("TORCHREPLAY_NATIVE") != "0"


OLDEST_SETUPTOOLS, OLDEST_TORCH, OLDEST_GCC = 77, (2, 11), 11
NEEDS_TORCH = f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"
INSTALL = (
    "Run in the clone: pip install . (or: uv pip install .). With --no-build-isolation, install torch and "
    '"setuptools>=77" before'
)


def check_environment() -> None:
    """Ends with a sentence where compiling cannot succeed, before anything is copied."""
    if sys.platform != "linux":
        sys.exit(f"torchreplay runs on Linux (x86-64), and this is {sys.platform}")
    check_torch()
    check_compiler()
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").is_file():
        sys.exit(f"{headers} has no Python.h: install Python's headers, such as the package python3-dev")


def check_torch() -> None:
    """Ends with a sentence where there is no torch to build against."""
    if torch_directory() is None:
        sys.exit(f"torchreplay is compiled against torch 2.11 or later, and this environment has none. {INSTALL}")
    named = next(iter(distributions(name="torch", path=places_of_torch())), None)
    found = named.version if named else "unknown"
    if named and tuple(int(n) for n in re.findall(r"\d+", found)[:2]) < OLDEST_TORCH:
        sys.exit(f"torch {found} is too old: torchreplay needs torch 2.11 or later. {INSTALL}")


def check_compiler() -> None:
    """Ends with a sentence where the compiler does not know C++20."""
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++"
    command = [*shlex.split(compiler), "-dM", "-E", "-x", "c++", os.devnull]
    try:
        macros = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"torchreplay is C++ and there is no compiler {compiler!r}: install g++ 11 or later")
    found = re.search(r"define __GNUC__ (\d+)", macros)
    if found and "__clang__" not in macros and int(found[1]) < OLDEST_GCC:
        sys.exit(f"{compiler} is of version {found[1]}: torchreplay needs g++ 11 or later. CXX=g++-12 names another")


def places_of_torch() -> list[str]:
    """Where torch may lie: on the path, and where pip installs to, which its isolated builds hide from the path."""
    return [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]


def torch_directory() -> Path | None:
    """The installed torch, found without the seconds that importing it takes."""
    found = (Path(place, "torch") for place in places_of_torch())
    return next((directory for directory in found if (directory / "__init__.py").is_file()), None)


def requirements() -> list[str]:
    """What a build asks for: torch, where the environment that is installed into has none to compile against.

    Any torch will do, since the modules keep to its stable ABI. uv hides that environment, and has torch in its cache.
    """
    asked = sys.argv[1:2] == ["egg_info"]  # only then setuptools' backend does nothing else with the answer
    return [NEEDS_TORCH] if NATIVE and asked and torch_directory() is None else []


class DescribeWhereItBuilds(dist_info):
    """Checks before pip looks at what to install: later it has downloaded all of it."""

    def run(self) -> None:
        if NATIVE:
            check_environment()
        super().run()


class BuildAfterChecks(build):
    """Checks before files are copied."""

    def run(self) -> None:
        if NATIVE:
            check_environment()
        super().run()


class BuildAgainstTorch(build_ext):
    """Adds torch's headers and library when extensions are compiled, so that an sdist needs no torch."""

    def run(self) -> None:
        """Compiles, and leaves the modules in the source, too: there Python finds it before the installed package."""
        super().run()
        if not self.inplace and not FAULTS:
            self.copy_extensions_to_source()

    def build_extensions(self) -> None:
        check_environment()
        torch = torch_directory()
        assert torch is not None
        for extension in self.extensions:
            # -isystem: the warnings are for our own code.
            extension.extra_compile_args += ["-isystem", str(torch / "include")]
            if extension.name == "torchreplay._ops":
                extension.library_dirs.append(str(torch / "lib"))
        super().build_extensions()


if int(setuptools.__version__.partition(".")[0]) < OLDEST_SETUPTOOLS:  # it would not understand pyproject.toml
    sys.exit(f"setuptools {setuptools.__version__} is too old: torchreplay is built with 77 or later. {INSTALL}")

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
    setup_requires=requirements(),
    ext_modules=[CALLS, *([] if FAULTS else [OPERATORS])] if NATIVE else [],
    cmdclass={"build": BuildAfterChecks, "build_ext": BuildAgainstTorch, "dist_info": DescribeWhereItBuilds},
    options={"build_ext": {"parallel": 2}, "bdist_wheel": {"py_limited_api": "cp311"}},
)
