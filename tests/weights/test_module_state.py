"""Weights go from and into modules with any wrapper and any kind of state dict."""

import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchreplay as tr
from torchreplay.ray.remote import remote_weights


class Net(nn.Module):
    """A body, a head tied to it, and a buffer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 3)
        self.head.weight = self.body[0].weight


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module):
    return torch.compile(module, backend="eager")


def compiled_in_parts(module):
    module.body[1] = compiled(module.body[1])
    module.body = compiled(module.body)
    return module


def parallel_in_parts(module):
    module.body = nn.DataParallel(module.body)
    return module


def in_place(module):
    module.compile(backend="eager")
    return module


WRAPPINGS = {
    "bare": lambda net: net,
    "compiled": compiled,
    "compiled in place": in_place,
    "compiled in parts": compiled_in_parts,
    "DataParallel": nn.DataParallel,
    "DataParallel in parts": parallel_in_parts,
    "DDP": nn.parallel.DistributedDataParallel,
    "compiled DDP": lambda net: compiled(nn.parallel.DistributedDataParallel(net)),
    "DDP of a compiled one": lambda net: nn.parallel.DistributedDataParallel(compiled(net)),
    "all of it": lambda net: compiled(nn.parallel.DistributedDataParallel(compiled_in_parts(net))),
}


def filled(module, number):
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(number)
    return module


def numbers(module):
    return {x for tensor in module.state_dict().values() for x in tensor.double().unique().tolist()}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_wrapped_module_shares_publishes_and_pulls_as_the_bare_one_does(wrapping, process_group):
    bare, wrapped = filled(Net(), 1), filled(WRAPPINGS[wrapping](Net()), 2)
    weights = tr.SharedWeights(bare)
    explorer = pickle.loads(pickle.dumps(weights))
    assert set(weights.require_like(wrapped)) == set(bare.state_dict())
    assert weights.publish(wrapped) == 1
    assert explorer.pull(bare)
    assert numbers(bare) == {2}
    weights.publish(filled(bare, 3))
    assert explorer.pull(wrapped)
    assert numbers(wrapped) == {3}
    of_wrapped = tr.SharedWeights(wrapped)
    assert of_wrapped.pull(filled(bare, 0))
    assert numbers(bare) == {3}


def test_names_that_only_look_like_a_wrappers_stay():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    weights = tr.SharedWeights(Holder())
    assert set(weights.require_like(nn.DataParallel(Holder()))) == {"module.weight", "module.bias"}
    with pytest.raises(ValueError, match=r"differ from those shared in bias, module\.bias, module\.weight, weight"):
        weights.publish(nn.Linear(2, 2))


class Copying(Net):
    """Its state dict has copies, of twice the weights."""

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(self.double)
        self.register_load_state_dict_pre_hook(self.halve)
        self.loads = 0

    @staticmethod
    def double(module, state, prefix, metadata):
        state.update({name: 2 * tensor for name, tensor in state.items()})

    @staticmethod
    def halve(module, state, *_):
        module.loads += 1
        for name, tensor in state.items():
            state[name] = tensor / 2


def remote(weights, monkeypatch):
    """The weights as they are on another node, with nobody between."""
    monkeypatch.setattr(remote_weights, "NodeActor", lambda *_: SimpleNamespace(require_own_process=lambda: None))
    monkeypatch.setattr(remote_weights, "_listen", lambda *_: None)
    content = weights._native.buffer(weights.version).numpy()
    monkeypatch.setattr(remote_weights.RemoteWeights, "_fetch", lambda _: (weights.version, content))
    _, (handle, *described, _) = weights.__reduce__()
    return remote_weights.RemoteWeights(handle, *described)


@pytest.mark.parametrize("at", ["the learner's node", "another node"])
@pytest.mark.parametrize("wrap", [lambda net: net, compiled, nn.DataParallel])
def test_a_module_whose_state_dict_returns_copies_loads_what_it_pulls(wrap, at, monkeypatch):
    learner, explorer = Copying(), Copying()
    for tensor in (*learner.parameters(), *learner.buffers()):
        tensor.data.fill_(5)
    weights = tr.SharedWeights(learner)
    assert (remote(weights, monkeypatch) if at == "another node" else weights).pull(wrap(explorer))
    assert {x for t in (*explorer.parameters(), *explorer.buffers()) for x in t.unique().tolist()} == {5}
    assert explorer.loads == 1


def test_a_tensor_as_extra_state_is_set():
    class Counting(nn.Linear):
        count = torch.tensor(0)

        def get_extra_state(self):
            return self.count.clone()

        def set_extra_state(self, state):
            self.count = state

    learner, explorer = Counting(2, 2), Counting(2, 2)
    learner.count = torch.tensor(7)
    weights = tr.SharedWeights(learner)
    weights.pull(explorer)
    weights.publish(Counting(2, 2))
    assert explorer.count == 7
    assert torch.equal(explorer.weight, learner.weight)


def test_a_module_is_loaded_only_when_it_must_be(monkeypatch):
    monkeypatch.delattr(nn.Module, "load_state_dict")
    assert tr.SharedWeights(filled(Net(), 1)).pull(net := Net())
    assert numbers(net) == {1}
