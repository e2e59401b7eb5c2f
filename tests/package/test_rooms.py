"""The rooms of `docs/architecture.md` are those that there are, and the core's headers include downwards only."""

import re

import pytest
from paths import ROOT

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
FLOORS = (
    {"system"},
    {"tree", "locking"},
    {"segment"},
    {"write", "absorb"},
    {"session"},
    {"draw", "checkpoint"},
    {"prefetch"},
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
