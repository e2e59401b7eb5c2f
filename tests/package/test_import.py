"""`import torchreplay` brings torch and numpy, and nothing optional."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchreplay as tr

OPTIONAL = ("ray", "lightning", "pytorch_lightning", "gymnasium", "matplotlib", "rich", "safetensors")


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    program = (
        f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def imported_with_torch() -> set[str]:
    return modules_after("import torch, numpy")


@pytest.fixture(scope="module")
def imported_with_torchreplay() -> set[str]:
    return modules_after("import torchreplay")


@pytest.mark.parametrize("name", OPTIONAL)
def test_importing_torchreplay_does_not_import(name: str, imported_with_torchreplay: set[str]) -> None:
    assert name not in imported_with_torchreplay


def test_importing_torchreplay_imports_no_third_party_package_beyond_those_of_torch_and_numpy(
    imported_with_torch: set[str], imported_with_torchreplay: set[str]
) -> None:
    extra = imported_with_torchreplay - imported_with_torch - set(sys.stdlib_module_names)
    assert extra <= {"torchreplay"}


@pytest.mark.slow
def test_the_source_without_its_compiled_part_says_where_to_start_python(tmp_path):
    shutil.copytree(Path(tr.__file__).parent, tmp_path / "torchreplay", ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    only_here = "import sys; sys.meta_path = [found for found in sys.meta_path if 'editable' not in repr(found)]"
    command = [sys.executable, "-c", f"{only_here}\nimport torchreplay"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"ImportError: {tmp_path}/torchreplay is torchreplay's source, without its compiled part" in done.stderr


def test_the_old_name_of_a_linear_schedule_warns():
    with pytest.warns(DeprecationWarning, match=r"tr\.LinearSchedule"):
        assert tr.Linear is tr.LinearSchedule
