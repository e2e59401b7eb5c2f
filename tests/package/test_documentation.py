"""The documentation is true as far as a machine can see: its code runs, its links lead somewhere, its site builds.

A Python block that lacks no names is a whole program, and is run. All others are parts of programs: they are compiled,
and what they take from torchreplay must be there. A whole program is not run if its info string says `python compile`.
"""

import ast
import builtins
import importlib
import inspect
import os
import re
import subprocess
import symtable
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
import warm_interpreter
import yaml
from paths import ROOT

import torchreplay as tr

PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
RECORDS = {"benchmarks.md", "measurements.md", "measurements_parts.md", "measurements_shards.md"}
GUIDES = [page for page in PAGES if page.name not in RECORDS] + [ROOT / "examples" / "README.md"]
REFERENCE = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").rglob("*.md"))


@dataclass(frozen=True)
class Block:
    place: str
    info: str
    code: str

    @property
    def whole(self) -> bool:
        return not missing_names(self.code) and "compile" not in self.info.split()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^```(python[^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [
        Block(f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}", match[1], dedent(match[2]))
        for match in found
    ]


def missing_names(code: str) -> set[str]:
    """Names that a program uses and neither makes nor imports."""
    tables = [symtable.symtable(code, "block", "exec")]
    made = {s.get_name() for s in tables[0].get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    used: set[str] = set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        used |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
    return used - made - set(dir(builtins)) - {"__name__", "__file__"}


def attributes_of_torchreplay(code: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tr"
    }


def output_of(block: Block, directory: Path) -> str:
    program = directory / "program.py"
    program.write_text(block.code)
    run = warm_interpreter.run(program, [], directory, timeout=160)
    assert run.returncode == 0, run.stderr
    return run.stdout


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
QUICK_START = blocks_of(ROOT / "docs" / "quickstart.md")[0]
SAC = next(block for block in blocks_of(ROOT / "docs" / "lightning.md") if "class SAC" in block.code)
WHOLE = [block for block in BLOCKS if block.whole and block not in (QUICK_START, SAC)]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_compiles_and_names_only_what_torchreplay_has(block):
    compile(block.code, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert {name for name in attributes_of_torchreplay(block.code) if not hasattr(tr, name)} == set()


@pytest.mark.slow
@pytest.mark.parametrize("block", WHOLE, ids=lambda block: block.place)
def test_a_block_that_lacks_no_names_runs(block, tmp_path):
    output_of(block, tmp_path)


@pytest.mark.slow
def test_the_quick_start_learns_cartpole(tmp_path):
    assert QUICK_START.whole
    last = output_of(QUICK_START, tmp_path).splitlines()[-1]
    assert int(re.search(r"mean return (\d+)", last)[1]) >= 475, last


@pytest.mark.slow
def test_the_program_of_several_optimisers_learns_and_counts_batches(tmp_path):
    pytest.importorskip("pytorch_lightning")
    assert SAC.whole
    counted, returns = output_of(SAC, tmp_path).splitlines()[-2:]
    batches = 500
    assert [int(number) for number in re.findall(r"\d+", counted)] == [3 * batches, 64 * batches, batches // 10 + 1]
    before, after = map(float, re.findall(r"-?\d+\.\d+", returns))
    assert after > before / 2, returns  # returns are negative distances, summed
    assert (tmp_path / "run" / "last.ckpt.replay").is_dir()


def test_what_a_program_lacks_is_noticed():
    assert missing_names("import torch\nx = torch.ones(2)\nprint([x + i for i in x])") == set()
    assert missing_names("def f(a):\n    return a + b\nf(c)") == {"b", "c"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", re.sub(r"(?s)```.*?```|<!--.*?-->", "", page.read_text()))
    local = [link for link in links if not re.match(r"https?:|mailto:", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []


FACES = ["torchreplay", "torchreplay.explorers", "torchreplay.ray", "torchreplay.lightning"]


@pytest.mark.parametrize("module", FACES)
def test_the_reference_has_every_public_name(module):
    """By any of its names: what two modules have is described once."""
    pytest.importorskip("pytorch_lightning")
    face, faces = importlib.import_module(module), "|".join(map(re.escape, FACES))
    described = re.findall(rf"auto\w+:: ({faces})\.(\w+)$", REFERENCE, re.MULTILINE)
    modules = {of: importlib.import_module(of) for of in FACES}
    there = [getattr(modules[of], name) for of, name in described if name in modules[of].__all__]
    missing = [name for name in face.__all__ if not any(getattr(face, name) is what for what in there)]
    named = set(re.findall(rf"{re.escape(module)}\.(\w+)", REFERENCE))
    assert missing == []
    assert set(face.__all__) <= named


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_guide_is_no_diary(page):
    text = page.read_text()
    commits = [
        word for word in re.findall(r"\b[0-9a-f]{7,10}\b", text) if re.search("[a-f]", word) and re.search(r"\d", word)
    ]
    assert not commits
    assert not re.findall(
        r"(?i)beside (?:other|another) (?:work|run\b)|other work beside|had never seen the library", text
    )
    assert not re.findall(
        r"\b20\d\d-\d\d-\d\d\b|\b\d{1,2} (?:January|February|March|April|May|June|July|August"
        r"|September|October|November|December) 20\d\d\b",
        text,
    )


def test_the_first_program_of_the_readme_ends_on_the_first_screen():
    lines = (ROOT / "README.md").read_text().splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("```python"))
    end = lines.index("```", begin)
    assert end + 1 <= 40
    assert end - begin - 1 <= 20
    assert len(lines) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_not_cut_where_a_page_is_read(page):
    """So many columns a block has on GitHub, and in the site on a screen of 1280 points."""
    room = 124 if page.is_relative_to(ROOT / "docs") else 98
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for info, text in fences if "{" not in info for line in text.splitlines()]
    assert [line for line in lines if len(line) > room] == []


def test_nothing_is_tracked_that_git_ignores():
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert not subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def test_no_page_and_no_message_installs_the_name_from_pypi():
    sources = [path.read_text() for path in (*PAGES, *(ROOT / "torchreplay").rglob("*.py"), ROOT / "setup.py")]
    assert not [
        found
        for text in sources
        for found in re.findall(r"pip install [^\n`]*?[ '\"]torchreplay(?![-\w/])[^\n]*", text)
    ]


def test_the_reference_has_every_adapter():
    adapters = set(importlib.import_module("torchreplay.compat").__all__) - {"footprints", "indexes"}  # no adapters
    documented = set(re.findall(r"automodule:: torchreplay\.compat\.(\w+)$", REFERENCE, re.MULTILINE))
    assert documented == adapters


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "doctrees"]
    configured = re.search(r"^extensions = (\[.*?\])", (ROOT / "docs" / "conf.py").read_text(), re.MULTILINE)[1]
    # Its pages of source files take a third of the time, and hold no text of ours.
    extensions = ",".join(name for name in ast.literal_eval(configured) if name != "sphinx.ext.viewcode")
    run = subprocess.run(
        [*command, "-D", f"extensions={extensions}", ROOT / "docs", tmp_path / "site"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=160,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert (tmp_path / "site" / "searchindex.js").stat().st_size > 10_000
    cut = "Type<span class="  # the first line of a property up to its colon, taken for the property's type
    assert [page.name for page in (tmp_path / "site" / "api").rglob("*.html") if cut in page.read_text()] == []


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version"} <= set(citation)
    assert citation["version"] == tr.__version__


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_forms_call_only_make_targets_and_files_that_exist(path):
    text = yaml.safe_dump(yaml.safe_load(path.read_text()))
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in re.findall(r"run: make ([\w-]+)", text) if f"\n{name}:" not in makefile] == []
    assert [name for name in re.findall(r"run: (\.\S+)", text) if not os.access(ROOT / name, os.X_OK)] == []


@pytest.mark.parametrize("name", ["append", "extend", "reset", "step"])
def test_help_and_editors_say_the_same_of_a_writers_calls(name):
    stub = ast.parse((ROOT / "torchreplay" / "_C.pyi").read_text())
    writer = next(node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "Writer")
    method = next(node for node in writer.body if isinstance(node, ast.FunctionDef) and node.name == name)
    native = getattr(tr.Writer, name)
    assert inspect.getdoc(native) == ast.get_docstring(method)
    named = inspect.signature(native).parameters
    assert list(named) == [*(a.arg for a in method.args.kwonlyargs), method.args.kwarg.arg]
