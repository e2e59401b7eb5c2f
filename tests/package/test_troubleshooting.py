"""Every error text that `docs/troubleshooting.md` quotes stands in the sources."""

import ast
import re
from functools import cache

import pytest
from paths import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = re.findall(r"^### `(.+)`$", PAGE, flags=re.MULTILINE)
SHORTEST = 8
"""Characters of a quote's longest fixed part: fewer may stand anywhere."""


@cache
def texts() -> str:
    """What the package and its core can say: a line for each string, `...` for each value in it."""
    found = [text for path in (ROOT / "torchreplay").rglob("*.py") for text in python_strings(path.read_text())]
    sources = (*(ROOT / "cpp").rglob("*.h"), *(ROOT / "cpp").rglob("*.cpp"))
    return "\n".join([*found, *(text for path in sources for text in core_strings(path.read_text()))])


def python_strings(source: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(source)))
    within = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    return [
        "".join(part.value if isinstance(part, ast.Constant) else "..." for part in getattr(node, "values", [node]))
        for node in nodes
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        if id(node) not in within
    ]


def core_strings(source: str) -> list[str]:
    joined = re.sub(r'"\s*\n\s*"', "", source)
    return [text.replace('\\"', '"') for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)]


def fixed_parts(quote: str) -> list[str]:
    return [part.strip(" .,;:()'") for part in quote.split("...")]


@pytest.mark.parametrize("quote", QUOTES)
def test_the_quoted_text_is_one_that_the_package_says(quote):
    parts = [part for part in fixed_parts(quote) if part]
    assert max(map(len, parts)) >= SHORTEST, "too little of the text is fixed to find it by"
    assert [part for part in parts if part not in texts()] == []


def test_a_text_that_the_package_does_not_say_is_noticed():
    assert "the replay buffer was stopped" in texts()
    assert "the replay buffer was halted" not in texts()


def test_there_are_entries():
    assert len(QUOTES) > 30
