"""`setup.py`: what it says where it cannot build, and what an installation leaves in the clone."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import setuptools
import yaml
from paths import ROOT

PACKAGES = Path(setuptools.__file__).parent.parent


@pytest.fixture
def clone(tmp_path):
    """A clone with little to compile."""
    tree = tmp_path / "clone"
    for name in ("torchreplay", "cpp"):
        (tree / name).mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "torchreplay" / "__init__.py").touch()
    for name in ("python", "ops"):
        (tree / "cpp" / f"{name}.cpp").write_text("int nothing() { return 0; }\n")
    return tree


def hook(clone, name, before="", installed_to="/nowhere", **environment):
    """Runs a hook of the build as pip does, where setuptools alone is installed, and what `packages` has.

    `installed_to` is the environment's own place of packages, which pip hides from the path of an isolated build.
    """
    there = clone.parent / "packages"
    there.mkdir(exist_ok=True)
    for found in (PACKAGES / "_distutils_hack", *PACKAGES.glob("setuptools*")):
        (there / found.name).unlink(missing_ok=True)
        (there / found.name).symlink_to(found)
    script = f"""
        import sys
        sys.path += [".", {str(there)!r}]
        import sysconfig
        path_of = sysconfig.get_path
        sysconfig.get_path = lambda name: {str(installed_to)!r} if name.endswith("lib") else path_of(name)
        from setuptools import build_meta
        {before}
        print(build_meta.{name}(*[{str(clone.parent / "out")!r}] * {not name.startswith("get_")}))
    """
    (clone.parent / "out").mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], **environment}
    command = [sys.executable, "-S", "-c", textwrap.dedent(script)]
    return subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True)


def compiler_of(tmp_path, macros):
    """A compiler that says these macros of itself."""
    place = tmp_path / "compiler"
    place.write_text(f"#!/bin/sh\necho '{macros}'\n")
    place.chmod(0o755)
    return str(place)


def torch_of(clone, version, where="packages"):
    """An installed torch of this version, with nothing in it."""
    info = clone.parent / where / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    (info.parent / "torch").mkdir()
    (info.parent / "torch" / "__init__.py").touch()
    return info.parent


HOOKS = ["prepare_metadata_for_build_wheel", "build_wheel", "build_editable"]


def refusal(done):
    """What is said, where nothing was copied before."""
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "copying" not in said
    assert "Traceback" not in said
    assert not re.search(r"install [^:]*torchreplay", said)  # somebody else's, on PyPI
    return said


@pytest.mark.parametrize("name", HOOKS)
def test_an_environment_without_torch_is_told_how_to_build_before_anything_is_copied(clone, name):
    said = refusal(hook(clone, name))
    assert "this environment has none" in said
    assert "pip install ." in said


REQUIREMENTS = "get_requires_for_build_wheel"


def test_an_isolated_build_asks_for_torch_where_there_is_none(clone):
    done = hook(clone, REQUIREMENTS)
    assert done.stdout.splitlines()[-1] == "['torch>=2.11']", done.stderr


def test_an_isolated_build_compiles_against_the_torch_of_the_environment_that_it_is_installed_into(clone):
    there = torch_of(clone, "2.11.0", "site-packages")
    asked = hook(clone, REQUIREMENTS, installed_to=there)
    assert asked.stdout.splitlines()[-1] == "[]", asked.stderr
    described = hook(clone, HOOKS[0], installed_to=there)
    assert described.returncode == 0, described.stderr


def test_an_old_torch_is_named(clone):
    torch_of(clone, "2.10.1+cpu")
    assert "torch 2.10.1+cpu is too old: torchreplay needs torch 2.11 or later" in refusal(hook(clone, HOOKS[0]))


@pytest.mark.parametrize(
    ("macros", "sentence"),
    [
        ("#define __GNUC__ 10", "is of version 10: torchreplay needs g++ 11 or later"),
        (None, "there is no compiler '/nowhere/g++': install g++ 11 or later"),
    ],
)
def test_a_compiler_that_is_old_or_missing_is_named(clone, tmp_path, macros, sentence):
    torch_of(clone, "2.11.0")
    compiler = "/nowhere/g++" if macros is None else compiler_of(tmp_path, macros)
    for name in HOOKS:
        assert sentence in refusal(hook(clone, name, CXX=compiler))


def test_clang_is_not_taken_for_an_old_gcc(clone, tmp_path):
    torch_of(clone, "2.11.0")
    clang = compiler_of(tmp_path, "#define __GNUC__ 4\n#define __clang__ 1")
    done = hook(clone, HOOKS[0], CXX=clang)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        ("sysconfig.get_path = lambda *args: '/nowhere'", "/nowhere has no Python.h: install Python's headers"),
        (
            "sysconfig.get_config_vars(); sys.platform = 'darwin'",
            "torchreplay runs on Linux (x86-64), and this is darwin",
        ),
        ("import setuptools; setuptools.__version__ = '68.1.2'", "setuptools 68.1.2 is too old"),
    ],
    ids=["headers", "platform", "setuptools"],
)
def test_what_else_is_missing_is_named(clone, before, sentence):
    torch_of(clone, "2.11.0")
    assert sentence in refusal(hook(clone, HOOKS[0], before))


def test_an_sdist_needs_neither_torch_nor_a_compiler(clone):
    done = hook(clone, "build_sdist", CXX="/nowhere/g++")
    assert done.returncode == 0, done.stderr


def test_an_installation_leaves_compiled_modules_in_the_clone(clone):
    done = subprocess.run(
        [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('..')"],
        cwd=clone,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    modules = {f"torchreplay/{name}.abi3.so" for name in ("_C", "_ops")}
    wheel = next(clone.parent.glob("*.whl"))
    assert modules == {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    assert all((clone / name).is_file() for name in modules)


def release_check(*arguments):
    command = [sys.executable, ROOT / ".ci" / "release_check.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_release_whose_tag_is_not_the_version_is_refused_before_anything_is_built():
    done = release_check("--tag", "v99.0")
    assert done.returncode == 1
    assert re.fullmatch(r"the tag v99\.0 is not that of version (\S+): expected v\1\n", done.stderr)


def test_what_a_release_uploads_has_been_tried_before():
    release, wheels = (
        yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text()) for name in ("release", "wheels")
    )
    job = release["jobs"]["release"]
    assert job["needs"] == "dist"
    assert release["jobs"]["dist"]["uses"] == "./.github/workflows/wheels.yml"
    tried, kept = wheels["jobs"]["wheel"]["steps"][-2:]
    assert "make release-check" in tried["run"]
    fetched = next(step["with"] for step in job["steps"] if "download-artifact" in step.get("uses", ""))
    assert kept["with"] == fetched
    assert job["steps"][-1]["if"] == "github.ref_type == 'tag'"
