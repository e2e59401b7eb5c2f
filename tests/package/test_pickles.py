"""What travels is data: pickle writes names and numbers, and so does cloudpickle, by which Ray passes things on."""

import copy
import dataclasses
import pickle
import pickletools
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

import torchreplay as tr

cloudpickle = pytest.importorskip("ray.cloudpickle")

SPEC = {"x": tr.Field((2,)), "r": tr.Field()}
PACKAGE = str(Path(tr.__file__).parent)


def table():
    from torchreplay.workers.worker_table import WorkerTable

    return WorkerTable(3)


def data_module(buffer):
    pytest.importorskip("pytorch_lightning")
    from torchreplay.lightning import ReplayDataModule

    return ReplayDataModule(buffer, 4)


TRAVELLERS = {
    "buffer": lambda b: b,
    "handle": lambda b: b.handle(),
    "weights": lambda b: tr.SharedWeights(nn.Linear(2, 2)),
    "dataset": lambda b: tr.ReplayDataset(b, 4),
    "mixed dataset": lambda b: tr.MixedDataset({b: 1.0}, 4),
    "mixed dataset by name": lambda b: tr.MixedDataset({"own": b}, 4),
    "reverse": lambda b: tr.Reverse(b, 4),
    "batch": lambda b: b.sample(2),
    "statistics": lambda b: b.stats(),
    "tree": lambda b: tr.PriorityTree(8),
    "table of a pool of workers": lambda b: table(),
    "data module": data_module,
    "spec": lambda b: b.spec,
    "sampler": lambda b: tr.Prioritized(beta=tr.LinearSchedule(0.4, 1.0, 10)),
    "configuration": lambda b: b._config,
}


@pytest.fixture
def buffer():
    buffer = tr.ReplayBuffer(SPEC, 10, sampler=tr.Prioritized())
    buffer.extend(x=np.zeros((3, 2)), r=np.zeros(3))
    return buffer


def functions_by_value(data):
    """Calls in a pickle that build code or functions instead of naming them."""
    strings = [argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)]
    return [text for text in strings if text in ("CodeType", "_builtin_type", "_make_function", "FunctionType")]


def test_a_function_by_value_would_be_noticed():
    assert functions_by_value(cloudpickle.dumps(lambda: 0))


@pytest.mark.parametrize("make", TRAVELLERS.values(), ids=TRAVELLERS.keys())
def test_what_travels_is_the_same_data_for_cloudpickle_as_for_pickle(buffer, make):
    traveller = make(buffer)
    data, plain = cloudpickle.dumps(traveller), pickle.dumps(traveller)
    assert functions_by_value(data) == []
    for path in (PACKAGE, __file__, "site-packages"):
        assert path.encode() not in data
    assert len(data) <= len(plain) + 64
    assert type(cloudpickle.loads(data)) is type(traveller)


LOAD = """
import pickle, sys
for thing in pickle.load(sys.stdin.buffer):
    print(type(thing).__name__, getattr(thing, "capacity", ""), getattr(thing, "version", ""))
"""


def test_a_process_started_from_nothing_attaches_what_cloudpickle_wrote(buffer):
    weights = tr.SharedWeights(nn.Linear(2, 2))
    things = [buffer, weights, tr.ReplayDataset(buffer, 4)]
    result = subprocess.run(
        [sys.executable, "-c", LOAD], input=cloudpickle.dumps(things), capture_output=True, check=True
    )
    assert result.stdout.decode().split("\n")[:3] == ["ReplayBuffer 10 ", "SharedWeights  0", "ReplayDataset  "]


ATTACH_ELSEWHERE = """
import pickle, sys
import torchreplay.buffer.replay_buffer, torchreplay.weights.shared_weights
for room in (torchreplay.buffer.replay_buffer, torchreplay.weights.shared_weights):
    room.is_elsewhere = lambda node: True
assert "torchreplay.ray" not in sys.modules
print(*(type(thing).__name__ for thing in pickle.load(sys.stdin.buffer)))
"""


@pytest.mark.slow
def test_a_process_of_another_node_that_has_imported_no_ray_room_attaches_what_stands_there(buffer, monkeypatch):
    monkeypatch.setattr("torchreplay.segment.handle.ray_node", lambda: "1" * 56)
    things = [buffer, tr.SharedWeights(nn.Linear(2, 2))]
    command = [sys.executable, "-c", ATTACH_ELSEWHERE]
    result = subprocess.run(command, input=pickle.dumps(things), capture_output=True, check=True, timeout=120)
    assert result.stdout.decode().split() == ["RemoteBuffer", "RemoteWeights"]


def test_a_buffer_of_another_node_pickles_by_name_and_refuses_to_be_copied(buffer):
    from torchreplay.ray.remote.remote_buffer import RemoteBuffer

    remote = RemoteBuffer(dataclasses.replace(buffer.handle(), node="1" * 56))
    data = cloudpickle.dumps(remote)
    assert functions_by_value(data) == []
    assert PACKAGE.encode() not in data
    assert len(data) <= len(pickle.dumps(buffer)) + 128
    with pytest.raises(TypeError, match=r"on node 1+: call copy\(\) there, or save it there and load it here"):
        copy.deepcopy(remote)


def test_a_sharded_replay_pickles_by_name_and_refuses_to_be_copied():
    from torchreplay.ray.sharded.sharded_replay import ShardedReplay
    from torchreplay.schema.config import Config

    replay = ShardedReplay.__new__(ShardedReplay)  # no cluster is needed to say what it is
    replay._nonce, replay._sampler, replay._config = 1, SimpleNamespace(seed=2), Config.of(SPEC, 10, None, None, None)
    replay._capacity, replay._count = 10, 1
    data = cloudpickle.dumps(replay)
    assert functions_by_value(data) == []
    assert PACKAGE.encode() not in data
    with pytest.raises(TypeError, match=r"save\(directory\) it, and ShardedReplay\.load\(directory\) makes another"):
        copy.deepcopy(replay)


def test_what_a_pool_sends_to_its_workers_is_small_and_no_code(buffer):
    from torchreplay.explorers.explorer_pool import ExplorerTask
    from torchreplay.ray.workers.table_replica import TableReplica
    from torchreplay.workers.worker_process import Launch
    from torchreplay.workers.worker_table import WorkerTable

    # A function of an installed module, as explorers' are: cloudpickle writes those of tests out.
    work = ExplorerTask(tr.sequence_priority, {"own": buffer}, tr.SharedWeights(nn.Linear(2, 2)), 1)
    data = cloudpickle.dumps((work, Launch(0, 2, 1, 0), WorkerTable(2), partial(TableReplica, None)))
    assert functions_by_value(data) == []
    assert PACKAGE.encode() not in data
    assert len(data) < 1500
