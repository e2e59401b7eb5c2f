"""Environments with one or no Lightning library."""

import os
import subprocess
import sys
import textwrap
import types

import pytest
from paths import import_path

pytest.importorskip("pytorch_lightning")


def run_python(script, *arguments):
    """Runs a script in a fresh interpreter; returns its standard output."""
    path = import_path()
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["lightning.pytorch", "pytorch_lightning"])
def test_one_installed_library_is_enough(tmp_path, absent):
    script = tmp_path / "one.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.modules[{absent!r}] = None  # importing it fails, as if it were not installed
        from torchreplay.lightning import PriorityFeedback, ReplayDataModule
        kinds = PriorityFeedback, ReplayDataModule
        bases = {{base.__module__.split(".")[0] for kind in kinds for base in kind.__mro__}}
        print(sorted(bases & {{"lightning", "pytorch_lightning"}}))
        """)
    )
    present = {"lightning.pytorch": "pytorch_lightning", "pytorch_lightning": "lightning"}[absent]
    assert run_python(script).strip() == f"['{present}']"


@pytest.mark.slow
def test_without_any_library_the_error_says_what_to_install(tmp_path):
    script = tmp_path / "none.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import torchreplay
        assert not [name for name in sys.modules if "lightning" in name]
        sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
        try:
            import torchreplay.lightning
        except ImportError as error:
            print(error)
        """)
    )
    assert "pip install pytorch-lightning" in run_python(script)


def test_libraries_of_two_versions_are_not_joined(monkeypatch):
    from torchreplay.lightning.compat import _installed_libraries

    old, new = types.ModuleType("pytorch_lightning"), types.ModuleType("lightning.pytorch")
    old.__version__, new.__version__ = "2.5.0", "2.6.6"
    monkeypatch.setitem(sys.modules, "lightning.pytorch", new)
    monkeypatch.setattr("lightning.pytorch", new)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", old)
    assert _installed_libraries() == [new]
    old.__version__ = new.__version__
    assert _installed_libraries() == [new, old]
