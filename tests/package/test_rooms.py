"""The rooms of `docs/architecture.md` are those that there are, and the core's headers include downwards only."""

import ast
import importlib
import re

import pytest
from paths import ROOT

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
FLOORS = (
    {"system"},
    {"tree", "locking", "wire"},
    {"segment"},
    {"write", "absorb"},
    {"session"},
    {"draw", "checkpoint"},
    {"prefetch"},
    {"client"},
    {"python", "ops"},
)
"""Rooms of the native core, from the ground."""


def test_every_room_of_the_package_has_a_line():
    package = ROOT / "torchreplay"
    rooms = {path.parent.relative_to(package).as_posix() for path in package.rglob("__init__.py")} - {".", "ray"}
    told = set(re.findall(r"^\| `((?!cpp)[\w/]+)/` \|", ARCHITECTURE, re.MULTILINE))
    assert told == rooms


def test_every_room_of_the_core_has_a_line():
    rooms = {path.parent.name for path in (ROOT / "cpp").glob("*/*.h")}
    assert set(re.findall(r"^\| `cpp/(\w+)/` \|", ARCHITECTURE, re.MULTILINE)) == rooms == set().union(*FLOORS)


def test_every_file_that_is_named_is_there():
    named = re.findall(r"`((?:cpp|[a-z_]+)/[\w/]+\.(?:py|h))`", ARCHITECTURE)
    assert len(named) > 15
    for name in named:
        assert (ROOT / name).is_file() or (ROOT / "torchreplay" / name).is_file(), name


@pytest.mark.parametrize("floor", range(len(FLOORS)))
def test_headers_include_their_own_room_and_those_below(floor):
    below = set().union(*FLOORS[:floor])
    for room in FLOORS[floor]:
        for path in (ROOT / "cpp" / room).glob("*.h"):
            included = set(re.findall(r'#include "(?:(\w+)/)?\w+\.h"', path.read_text()))
            assert included <= below | {room}, path


def test_the_bindings_take_no_lock_and_do_not_sleep_or_read_what_a_segment_counts():
    """They check arguments and convert. What a process does with a segment is for `cpp/client/`."""
    session = r"\b(SegmentLock|header\(\)|futex_\w+|sleep_for|nanosleep|publish_limit|fork_generation)\b"
    for room in ("python", "ops"):
        for path in (ROOT / "cpp" / room).glob("*.h"):
            code = re.sub(r"//.*", "", path.read_text())
            assert re.findall(session, code) == [], path


def test_the_client_includes_neither_python_nor_torch():
    for path in (ROOT / "cpp" / "client").glob("*.h"):
        assert not re.search(r"#include [<\"](Python|torch|python)", path.read_text()), path


# Faces: a room's `__all__` names the files, or the names, that other rooms may import.

PACKAGE = ROOT / "torchreplay"
FILES = {"torchreplay.explorers": ["explorer_pool", "named"], "torchreplay.lightning": ["compat"]}
"""Files that other rooms may import beside a face that is made for users."""


def room_of(module):
    """Returns the room that a module `torchreplay.x.y` lies in, or is; None for files beside the rooms."""
    parts = module.split(".")
    parts = parts[:3] if parts[1:2] == ["ray"] else parts[:2]
    room = ".".join(parts)
    return room if len(parts) > 1 and PACKAGE.joinpath(*parts[1:]).is_dir() else None


def imports_from_other_rooms():
    """Yields (file, room, module, names) of each import of a module in another room."""
    for path in sorted(PACKAGE.rglob("*.py")):
        own = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchreplay."):
                room = room_of(node.module)
                if room not in (None, own, "torchreplay.ray"):
                    yield path, room, node.module, [alias.name for alias in node.names]


def test_rooms_import_what_is_in_the_face_of_another_room_and_nothing_private():
    seen = set()
    for path, room, module, names in imports_from_other_rooms():
        face = importlib.import_module(room).__all__
        file = module.removeprefix(room).lstrip(".")
        assert file in [*face, *FILES.get(room, [])] or set(names) <= set(face), f"{path} imports {names} of {module}"
        assert not [name for name in names if name.startswith("_")], f"{path} imports {names} of {module}"
        seen.add(room)
    assert len(seen) > 12


def test_a_face_names_nothing_that_is_not_there():
    for path in sorted(PACKAGE.rglob("__init__.py")):
        room = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
        assert getattr(room, "__all__", None), f"{path} has no face"
        for name in room.__all__:
            beside = (path.parent / f"{name}.py", path.parent / name / "__init__.py")
            assert any(file.is_file() for file in beside) or hasattr(room, name), f"{path}: {name}"
