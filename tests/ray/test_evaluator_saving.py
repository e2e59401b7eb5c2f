"""What an evaluator saves: the best weights, and those at intervals, also after kills and failures."""

import shutil
import statistics

import numpy as np
import pytest
import torch
from evaluated_policies import SPREAD, Loop, Policy, evaluate, kept, publish, run_once
from numbered_rows import make_buffer, row
from safetensors import safe_open
from safetensors.torch import load_file

import torchreplay as tr
from torchreplay.evaluation.evaluation_log import EvaluationLog
from torchreplay.ray import Evaluator, ShardedReplay
from torchreplay.schema.config import Configured
from torchreplay.workers.worker_process import Launch
from torchreplay.workers.worker_table import WorkerTable


def test_the_best_weights_are_kept_and_those_at_intervals_with_the_buffer(tmp_path):
    weights, buffer = tr.SharedWeights(Policy(1)), make_buffer()
    buffer.extend(**{name: torch.as_tensor(np.asarray([value])) for name, value in row(0, 0, 0).items()})
    directory = tmp_path / "run"
    evaluator = Evaluator(evaluate, weights, Policy, every=1, directory=directory, save_every=2, buffer=buffer)
    with Loop(evaluator) as loop:
        loop.look_around()
        for number in (5, 4, 3):
            publish(weights, number)
            loop.look_around()
    assert [evaluation.best for evaluation in evaluator.evaluations] == [True, True, False, False]
    assert load_file(directory / "best.safetensors")["number"].item() == 5.0
    with safe_open(directory / "best.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["version"] == "1"
    assert float(metadata["mean_return"]) == evaluator.best.mean_return
    names = ["best.safetensors", "buffer", "version-00000001.safetensors", "version-00000003.safetensors"]
    assert sorted(path.name for path in directory.iterdir()) == names
    assert load_file(directory / names[-1])["number"].item() == 3.0
    assert len(tr.ReplayBuffer.load(directory / "buffer")) == 1


def test_several_buffers_are_saved_by_name(tmp_path):
    buffers = {"red": make_buffer(), "blue": make_buffer()}
    for name, buffer in buffers.items():
        rows = len(name)
        buffer.extend(**{field: torch.zeros(rows, *of.shape, dtype=of.dtype) for field, of in buffer.spec.items()})
    weights = tr.SharedWeights(Policy())
    run_once(Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path, buffer=buffers))
    for name in buffers:
        with tr.ReplayBuffer.load(tmp_path / "buffer" / name) as loaded:
            assert len(loaded) == len(name)
    for name in ("../red", ".", "a/b"):
        with pytest.raises(ValueError, match="directory of that name"):
            Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path, buffer={name: buffers["red"]})


def test_what_its_worker_could_not_save_is_refused(tmp_path):
    class Remote(Configured):
        """Such as a buffer becomes on another node."""

    weights = tr.SharedWeights(Policy())
    with pytest.raises(TypeError, match="a buffer of this node"):
        Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path, buffer=Remote())
    sharded = ShardedReplay.__new__(ShardedReplay)
    with pytest.raises(ValueError, match="backend='process': the shards"):
        Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path, buffer=sharded, backend="process")


def test_the_best_of_an_earlier_run_is_only_replaced_by_a_better_one(tmp_path):
    def learn(*numbers):
        weights = tr.SharedWeights(Policy(numbers[0]))
        evaluator = Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path)
        with Loop(evaluator) as loop:
            loop.look_around()
            for number in numbers[1:]:
                publish(weights, number)
                loop.look_around()
        return load_file(tmp_path / "best.safetensors")["number"].item()

    assert learn(5) == 5.0
    assert learn(3, 4) == 5.0
    assert learn(4, 6) == 6.0


def test_worse_weights_do_not_take_the_place_of_the_best_when_the_buffer_cannot_be_saved(tmp_path):
    buffer = make_buffer()
    buffer.extend(**{name: torch.zeros(1, *field.shape, dtype=field.dtype) for name, field in buffer.spec.items()})
    weights = tr.SharedWeights(Policy(3.0))
    evaluator = Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path, buffer=buffer)
    run_once(evaluator)
    assert kept(tmp_path) == 3.0
    shutil.rmtree(tmp_path / "buffer")
    (tmp_path / "buffer").touch()
    for number in (200.0, 50.0):
        publish(weights, number)
        with pytest.raises(OSError, match="buffer"):
            run_once(evaluator)
        assert kept(tmp_path) == 3.0
        assert [evaluation.mean_return for evaluation in evaluator.evaluations] == [3.0 + statistics.mean(SPREAD)]
    (tmp_path / "buffer").unlink()
    run_once(evaluator)
    assert kept(tmp_path) == 50.0


@pytest.mark.parametrize(("newer", "best"), [([50.0, 10.0], 200.0), ([50.0, 300.0], 300.0), ([], 200.0)])
def test_a_worker_killed_before_it_notes_the_best_leaves_it_to_its_successors(newer, best, tmp_path, monkeypatch):
    weights = tr.SharedWeights(Policy(200.0))
    evaluator = Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path)

    def die(*_):
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(EvaluationLog, "add", die)
        work = evaluator._make_work().begin(Launch(0, 1, 0, 0), WorkerTable(1))
        with pytest.raises(InterruptedError):
            work.run()
    assert kept(tmp_path) == 200.0
    for number in newer:
        publish(weights, number)
        run_once(evaluator)
        assert evaluator.stats().best_return == max(200.0, number) + statistics.mean(SPREAD)
    if not newer:
        run_once(evaluator)  # the same weights again
        assert evaluator.latest.best
    assert kept(tmp_path) == best


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(fd):
        raise tr.Stopped("the pool was stopped")

    evaluator = Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1, directory=tmp_path)
    work = evaluator._make_work().begin(Launch(0, 1, 0, 0), WorkerTable(1))
    monkeypatch.setattr("torchreplay.checkpoint.buffer_checkpoint.os.fsync", interrupt)
    with pytest.raises(tr.Stopped):
        work.run()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_save_has_left_is_removed_by_the_next(tmp_path):
    for name in ("best.safetensors", "version-00000007.safetensors"):
        (tmp_path / f"{name}-0123456789abcdef").touch()
    kept = tmp_path / "best.safetensors-of-last-week"
    kept.touch()
    evaluator = Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1, directory=tmp_path)
    with Loop(evaluator) as loop:
        loop.look_around()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "best.safetensors", kept]


def test_weights_that_are_tied_are_saved_too(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(2, 2)
            self.other = self.one

    evaluator = Evaluator(lambda module, seed: 1.0, tr.SharedWeights(Tied()), Tied, every=1, directory=tmp_path)
    with Loop(evaluator) as loop:
        loop.look_around()
    Tied().load_state_dict(load_file(tmp_path / "best.safetensors"))


def test_a_directory_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "best.safetensors").write_text("a diary")
    with pytest.raises(tr.CheckpointError, match=r"best\.safetensors"):
        Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1, directory=tmp_path)
