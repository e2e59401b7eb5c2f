"""What every test runs under: one torch thread, repeatable examples, no GPU tests without a GPU, counts at the end."""

import os

import hypothesis
import pytest
import torch
from tally import nothing_is_left, pytest_runtest_makereport, pytest_terminal_summary, tally

__all__ = ["nothing_is_left", "pytest_runtest_makereport", "pytest_terminal_summary", "tally"]

# Several processes share few cores: a thread pool in each of them measures the scheduler, not the code.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# No deadline: a busy machine is no failure. The same examples on every run: a red build must be repeatable.
hypothesis.settings.register_profile("torchreplay", deadline=None, derandomize=True)
hypothesis.settings.load_profile("torchreplay")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips `gpu` tests where CUDA is missing."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
