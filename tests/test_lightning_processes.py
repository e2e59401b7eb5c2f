"""Lightning across processes: two ranks on one machine, and environments with one or no Lightning library."""

import json
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

import torchreplay as tr

pytest.importorskip("pytorch_lightning")

from torchreplay.lightning import ReplayDataModule

RANKS = """
import json, sys
from pathlib import Path
import pytorch_lightning as lightning
from lightning_learner import QUIET, filled_buffer, make_learner
from torchreplay.lightning import PriorityFeedback, ReplayDataModule, WeightPublisher
import torchreplay as tr

made = []

class Crew:
    def __init__(self, buffer): made.append("crew")
    def start(self): made.append("start")
    def stop(self): made.append("stop")

def make_buffer():
    made.append("buffer")
    return filled_buffer()

lightning.seed_everything(1)
# Equal TD errors: the draws stay spread out, so that equal batches would mean equal streams.
learner = make_learner(lightning, lambda loss, td, step: {"loss": loss, "td_error": td / td})
weights = tr.SharedWeights(learner.q)
data = ReplayDataModule(make_buffer, 8, steps_per_epoch=5, explorers=Crew)
stats = {}

class Last(lightning.Callback):
    def on_train_end(self, trainer, learner):
        trainer.strategy.barrier()
        stats.update(sampled=data.buffer.stats().sampled, updated=data.buffer.stats().updated)
        trainer.strategy.barrier()

trainer = lightning.Trainer(**{**QUIET, "devices": 2}, strategy="ddp", max_epochs=2,
                            callbacks=[PriorityFeedback(), WeightPublisher(weights, 5, "q"), Last()])
trainer.fit(learner, datamodule=data)
weight = learner.q.weight.tolist()
report = {"made": made, "seen": learner.seen, "published": weights.version, "weight": weight, **stats}
Path(sys.argv[1], f"{trainer.global_rank}.json").write_text(json.dumps(report))
"""


def run_python(script, *arguments):
    """Runs a script in a fresh interpreter; returns its standard output."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(tr.__file__).parent.parent)])
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


def test_two_ranks_train_from_one_buffer_and_draw_different_batches(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    run_python(script, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["made"] == ["buffer", "crew", "start", "stop"]
    assert second["made"] == []
    drawn = [tuple(keys) for rank in (first, second) for keys in rank["seen"]]
    assert len(drawn) == len(set(drawn)) == 20
    assert first["sampled"] == first["updated"] == second["updated"] == 20 * 8
    assert (first["published"], second["published"]) == (3, 0)
    assert first["weight"] == second["weight"]


class Strategy:
    """The part of a DDP strategy that the data module uses, for rank 1 with rank 0's value at hand."""

    def __init__(self, value):
        self.value = value

    def broadcast(self, value, src=0):
        return self.value


class SecondRank:
    world_size, num_nodes, local_rank = 2, 1, 1

    def __init__(self, buffer):
        self.strategy = Strategy(buffer.handle())


@pytest.fixture
def rank_zero_buffer():
    buffer = tr.ReplayBuffer({"obs": tr.Field((4,))}, capacity=64, seed=3)
    buffer.extend(obs=torch.ones(64, 4))
    yield buffer
    buffer.close()


def test_a_rank_attaches_to_the_buffer_of_rank_zero_and_leaves_it_running(rank_zero_buffer):
    data = ReplayDataModule(lambda: 1 / 0, 8)
    data.trainer = SecondRank(rank_zero_buffer)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    rank_zero_buffer.update_priorities(batch, torch.ones(8))
    data.teardown("fit")
    assert not rank_zero_buffer.stopped
    assert rank_zero_buffer.sample(8)["obs"].shape == (8, 4)


def test_a_buffer_stopped_under_one_of_several_ranks_is_an_error_there_not_a_hang_elsewhere(rank_zero_buffer):
    data = ReplayDataModule(lambda: 1 / 0, 8)
    data.trainer = SecondRank(rank_zero_buffer)
    data.setup("fit")
    stream = iter(data.train_dataloader())
    next(stream)
    rank_zero_buffer.stop()
    with pytest.raises(tr.Stopped, match="several ranks"):
        next(stream)


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
    from torchreplay.lightning.libraries import _installed_libraries

    old, new = types.SimpleNamespace(__version__="2.5.0"), types.SimpleNamespace(__version__="2.6.6")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", new)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", old)
    assert _installed_libraries() == [new]
    old.__version__ = new.__version__
    assert _installed_libraries() == [new, old]
