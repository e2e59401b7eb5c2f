"""The site that `make docs` builds from these pages: Sphinx, MyST for Markdown, furo for the look."""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import Any

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer

import torchreplay

project = "torchreplay"
copyright = "the torchreplay authors, under the Apache License 2.0"
version = release = torchreplay.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

default_role = "code"  # of `names` in docstrings
suppress_warnings = ["ref.python"]  # classes of torchreplay.compat are named as those of torchreplay

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_mock_imports = [name for name in ("cpprb", "h5py", "ray", "stable_baselines3") if find_spec(name) is None]
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # one list of attributes
add_module_names = False

html_theme = "furo"
html_title = f"torchreplay {version} (unreleased)"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme_options = {"top_of_page_buttons": []}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("static") / "scorer.js")

ROOT = Path(__file__).parent.parent
PAGES = {
    "CHANGELOG.md": "docs/changelog.md",
    "CONTRIBUTING.md": "docs/contributing.md",
    "examples/README.md": "docs/examples.md",
    "tests/fuzz/README.md": "docs/fuzzers.md",
    "tests/model/README.md": "docs/protocol_model.md",
}
"""Files of the repository that are pages of the site, too: these include them."""


ALIASES = {"torchreplay.Spec": "torchreplay.schema.spec"}
"""Names of types that the reference describes, and where their texts are."""


def moved(text: str, folder: str, page: str) -> str:
    """Returns a text of a folder of the repository, its links as the page of the site has them."""

    def link(match: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(folder, match[1]))
        there = os.path.relpath(PAGES.get(path, path), os.path.dirname(f"docs/{page}"))
        return f"]({there}" if (ROOT / path).exists() else match[0]

    return re.sub(r"\]\(([^)#:\s]+)", link, text)


def move_page(app: Any, page: str, text: list[str]) -> None:
    """Moves the links of a page to files that are pages, too."""
    text[0] = moved(text[0], os.path.dirname(f"docs/{page}"), page)


def move_included(app: Any, path: Path, page: str, text: list[str]) -> None:
    """Moves all links of a file that a page includes."""
    text[0] = moved(text[0], os.path.dirname(os.path.normpath(f"docs/{path}")), page)


def as_markup(app: Any, what: str, name: str, it: Any, options: Any, lines: list[str]) -> None:
    """Turns the little Markdown of a docstring, code fences and |absolute values|, into what Sphinx reads."""
    if name in ALIASES:  # autodoc takes the text of what an alias stands for
        lines[:] = ModuleAnalyzer.for_module(ALIASES[name]).find_attr_docs()["", name.split(".")[-1]]
    parts = re.split(r"(?ms)^```\w*\n(.*?)^```$", "\n".join(lines))
    bars = re.compile(r"(`[^`]*`|^ *(?:>>>|\.\.\.) .*$)|\|", re.MULTILINE)  # code keeps its bars as they are
    texts = [bars.sub(lambda match: match[1] or "\\|", part) for part in parts[::2]]
    parts[::2] = [re.sub(r"`?docs/(\w+)\.md`?", r":doc:`/\1`", text) for text in texts]
    parts[1::2] = [".. code-block:: python\n\n" + indent(part, "    ") for part in parts[1::2]]
    lines[:] = "".join(parts).split("\n")
    if what in ("attribute", "data", "property"):
        lines[0] = f": {lines[0]}"  # napoleon takes what stands before the first colon for a type: there is none


def short_types(app: Any, page: nodes.document) -> None:
    """Shortens what autodoc leaves as `~typing.Literal` within a union to its last name."""
    for text in list(page.findall(nodes.Text)):
        if (short := re.sub(r"~(?:typing|enum)\.(?=\w)", "", text)) != text:
            text.parent.replace(text, nodes.Text(short))


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", move_page)
    app.connect("include-read", move_included)
    app.connect("autodoc-process-docstring", as_markup, priority=100)
    app.connect("doctree-read", short_types)
