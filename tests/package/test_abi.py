"""The native modules keep to the stable interfaces of CPython and torch that one binary for all versions rests on."""

import subprocess
import sys
from pathlib import Path

import pytest

import torchreplay

PACKAGE = Path(torchreplay.__file__).parent
MODULES = ("_C", "_ops")


def binary(module: str) -> Path:
    return PACKAGE / f"{module}.abi3.so"


def undefined_symbols(path: Path) -> set[str]:
    listing = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", "--format=just-symbols", path],
        capture_output=True,
        text=True,
        check=True,
    )
    return {symbol.split("@")[0] for symbol in listing.stdout.split()}


@pytest.mark.parametrize("module", MODULES)
def test_each_module_is_built_for_the_limited_api_of_every_python(module: str) -> None:
    assert binary(module).is_file(), f"{binary(module)} is missing; `make build` compiles it"


@pytest.mark.parametrize("module", MODULES)
def test_abi3audit_finds_no_symbol_outside_the_limited_api_of_python_3_11(module: str) -> None:
    pytest.importorskip("abi3audit", reason="needs abi3audit, part of the dev extra")
    audit = [sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.11", str(binary(module))]
    result = subprocess.run(audit, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_binding_takes_nothing_from_torch() -> None:
    """It reads tensors through DLPack, so no release of torch can break it at load time."""
    foreign = {s for s in undefined_symbols(binary("_C")) if "torch" in s or "at6Tensor" in s or "c10" in s}
    assert foreign == set()


def test_the_operators_take_only_stable_symbols_from_torch() -> None:
    """LibTorch keeps `torch_*` and `aoti_torch_*` C functions across releases, and no mangled C++ name."""
    mangled = {
        s
        for s in undefined_symbols(binary("_ops"))
        if s.startswith(("_ZN2at", "_ZN3c10", "_ZN5torch", "_ZNK2at", "_ZNK3c10"))
    }
    assert mangled == set()
