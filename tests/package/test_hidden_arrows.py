"""No module reaches for another, or claims to be another kind of thing, in a way that linters cannot see."""

import ast
import sys

import pytest
from paths import ROOT

IMPORTS = {"import_module", "__import__", "load_module", "resolve_name", "run_module", "run_path", "exec", "eval"}
FRAMES = {"_getframe", "currentframe", "f_back", "f_globals", "f_locals"}

ALLOWED = {
    "torchreplay/__init__.py": {"import_module"},  # the names of the package's face, imported at their first use
    "torchreplay/cli/main.py": {"import_module"},  # the table of commands
    "torchreplay/workers/fork_server.py": {"import_module"},  # modules of the user's program: it alone names them
    "torchreplay/checking/loop_recording.py": {"_getframe", "f_back"},  # the lines of the user's loop
}

DOCUMENTED = {"os._exit", "sys._getframe", "zlib._Decompress"}
"""Names of the standard library that its manual, or its type hints, show in spite of the underscore."""


def hidden(source: str) -> set[str]:
    """Returns the names by which `source` imports by a string, looks at frames, casts, or sets `__class__`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) if name in IMPORTS | FRAMES:
                found.add(name)
            case ast.Attribute(attr=name) if name in IMPORTS - {"eval"} | FRAMES:  # `module.eval()` is torch's
                found.add(name)
            case ast.Attribute(value=ast.Name(id="typing" | "t"), attr="cast"):
                found.add("cast")
            case ast.Attribute(attr="__class__", ctx=ast.Store()) | ast.Name(id="__class__", ctx=ast.Store()):
                found.add("__class__")
            case ast.FunctionDef(name="__class__"):
                found.add("__class__")
            case ast.ImportFrom(module=module, names=names):
                ours = IMPORTS | FRAMES | ({"cast"} if module in ("typing", "typing_extensions") else set())
                found |= {alias.name for alias in names} & ours
    return found


@pytest.mark.parametrize(
    "source",
    [
        "from importlib import import_module as load",
        "import importlib\nimportlib.import_module('ray')",
        "__import__('ray')",
        "exec('import ray')",
        "import sys\nsys._getframe(1)",
        "import inspect\ninspect.currentframe()",
        "frame.f_back",
        "from typing import cast",
        "import typing\ntyping.cast(int, value)",
        "class A:\n    @property\n    def __class__(self): return int",
        "class A:\n    __class__ = int",
        "thing.__class__ = int",
    ],
)
def test_an_arrow_that_linters_cannot_see_would_be_noticed(source):
    assert hidden(source)


def test_what_linters_do_see_is_no_hidden_arrow():
    assert not hidden("import ray\nview.cast('B')\nmodule.eval()\nis_int = n.__class__ is int\nimport typing")


def test_nothing_imports_by_a_string_casts_looks_at_frames_or_poses_as_another_class_but_what_is_named_here():
    found = {}
    for path in sorted((ROOT / "torchreplay").rglob("*.py")):
        if names := hidden(path.read_text()):
            found[path.relative_to(ROOT).as_posix()] = names
    assert found == ALLOWED


def private(source: str) -> set[str]:
    """Returns the private names of the standard library that `source` uses by what it imports."""
    nodes = list(ast.walk(ast.parse(source)))
    modules, found = set(), set()
    for node in nodes:
        match node:
            case ast.Import(names=names):
                modules |= {a.asname or a.name.partition(".")[0] for a in names if is_standard(a.name)}
            case ast.ImportFrom(module=str(module), names=names, level=0) if is_standard(module):
                modules |= {alias.asname or alias.name for alias in names}
                found |= {f"{module}.{alias.name}" for alias in names if is_private(alias.name)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value
            while isinstance(owner, ast.Attribute | ast.Call):
                owner = owner.value if isinstance(owner, ast.Attribute) else owner.func
            if isinstance(owner, ast.Name) and owner.id in modules:
                found.add(ast.unparse(node))
    return found - DOCUMENTED


def is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nthreading._shutdown()",
        "import subprocess as s\ns._args_from_interpreter_flags()",
        "from multiprocessing import resource_tracker\nresource_tracker._resource_tracker.fd = 3",
        "from multiprocessing import process\nprocess.current_process()._inheriting = True",
        "from atexit import _clear",
    ],
)
def test_a_private_name_of_the_standard_library_would_be_noticed(source):
    assert private(source)


def test_no_module_uses_a_private_name_of_the_standard_library():
    assert not private("import os\nos._exit(1)\nos.__name__\nself._pid")
    for path in sorted((ROOT / "torchreplay").rglob("*.py")):
        assert not private(path.read_text()), path
