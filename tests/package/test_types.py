"""The types that the package ships, as `mypy --strict` sees them in a program of a user."""

import os
import subprocess
import sys

import pytest
from paths import ROOT

pytest.importorskip("mypy")

pytestmark = pytest.mark.slow

PROGRAM = """
import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

import torchreplay as tr
from torchreplay.ray import Evaluator, ExplorerContext, ExplorerPool


class Net(nn.Module): ...


def make(spec: tr.Spec) -> tr.ReplayBuffer:
    return tr.ReplayBuffer(spec, 100, sampler=tr.Prioritized(alpha=0.6, beta=0.4), view=tr.Rows())


def explore(ctx: ExplorerContext) -> None:
    writer = ctx.writer()
    while not ctx.stopped:
        writer.append(x=1.0)
        ctx.record(episode_return=1.0, episode_length=1)


def evaluate(policy: Net, seed: int) -> list[float]:
    return [float(seed)]


online = make({"x": tr.Field()})
demonstrations = make({"obs": {"image": tr.Field((3, 4, 4), torch.uint8)}, "x": tr.Field()})
shares = {online: 0.75, demonstrations: 0.25}
buffers = {"red": online, "blue": demonstrations}
tr.MixedDataset(shares)
tr.MixedDataset(buffers)
tr.MixedDataset({online: 1, demonstrations: 2})
mixed = tr.MixedDataset({online: 0.75, demonstrations: 0.25}, batch_size=256)
for batch in mixed:
    mixed.update_priorities(batch, batch["x"])
named = tr.MixedDataset({"red": online, "blue": demonstrations}, batch_size=256)
for batches in named:
    named.update_priorities(batches, {"red": batches["red"]["x"]})


def collect(handle: tr.Handle) -> None:
    with tr.ReplayBuffer.attach(handle) as buffer, buffer.writer() as writer:
        while not buffer.stopped and len(buffer) < buffer.capacity:
            writer.append(x=1.0)
        buffer.extend(x=[1.0, 2.0])
        print(buffer.spec, buffer.limiter, buffer.stats().size)
        if isinstance(buffer, tr.ReplayBuffer):
            buffer.update_priorities(buffer.sample(8), [1.0] * 8)
        buffer.stop()


weights = tr.SharedWeights(Net())
Evaluator(evaluate, weights, Net, every=1)
Evaluator(lambda policy, seed: [0.0], weights, Net(), every=1)
with ExplorerPool(explore, 2, online, weights):
    for batch in tr.ReplayDataset(online, batch_size=8, steps=10):
        online.update_priorities(batch, batch["x"])
with online.writer(num_envs=2, autoreset="same_step") as writer:
    writer.reset(x=[0.0, 0.0])
online.writer(num_envs=2, autoreset=AutoresetMode.SAME_STEP)
online.writer(gymnasium.make_vec("CartPole-v1", 2), "same_step")
online.writer(gymnasium.make("CartPole-v1"))
"""


NO_BUFFER = "import torchreplay as tr\ntr.MixedDataset({1: 0.5})\nspec: tr.Spec = {'x': 1}\n"
ATTACHED = "import torchreplay as tr\ndef f(h: tr.Handle) -> None:\n    tr.ReplayBuffer.attach(h).sample(8)\n"
PROGRAMS = {"documented": PROGRAM, "no_buffer": NO_BUFFER, "attached": ATTACHED}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one run of mypy says to each of the programs."""
    directory = tmp_path_factory.mktemp("programs")
    for name, program in PROGRAMS.items():
        (directory / f"{name}.py").write_text(program)
    # The settings and the cache of `make lint`: strict ones, and torch is not analysed once more.
    options = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}", "--no-error-summary"]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *(f"{name}.py" for name in PROGRAMS)],
        cwd=directory,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = (run.stdout + run.stderr).splitlines()
    of_programs = {name: "\n".join(line for line in lines if line.startswith(f"{name}.py:")) for name in PROGRAMS}
    assert sum(text.count("\n") + 1 for text in of_programs.values() if text) == len(lines), lines
    return of_programs


def test_documented_calls_pass_a_strict_type_check(complaints):
    assert complaints["documented"] == ""


def test_what_is_no_buffer_or_no_spec_does_not_pass(complaints):
    assert complaints["no_buffer"].count("error:") == 2, complaints


def test_what_is_attached_may_be_on_another_node_and_so_is_not_drawn_from_unasked(complaints):
    assert '"WritableReplay" has no attribute "sample"' in complaints["attached"]
