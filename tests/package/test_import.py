"""`import torchreplay` brings torch and numpy, and nothing optional."""

import json
import subprocess
import sys

import pytest

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
