"""Weights reach the explorers whole and at once, also after deaths on the way."""

import os
import pickle
import random
import re
import signal
import threading

import pytest
import torch
from forked import Forked, eventually, shared_counters
from torch import nn

import torchreplay as tr
from torchreplay.weights.shared_weights import go_on_from


class Constant(nn.Module):
    """Parameters and buffers that all hold one number."""

    def __init__(self, number=0.0, size=2000):
        super().__init__()
        self.first = nn.Parameter(torch.full((size,), number))
        self.second = nn.Parameter(torch.full((3, 5), number, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(int(number)))

    def fill(self, number):
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(number)
        return self

    def numbers(self):
        return {x for t in self.state_dict().values() for x in t.double().unique().tolist()}


def test_the_first_pull_copies_the_initial_weights_and_later_ones_only_what_is_newer():
    weights = tr.SharedWeights(Constant(3.0))
    module = Constant()
    assert (weights.version, weights.pulled_version) == (0, -1)
    assert weights.pull(module)
    assert module.numbers() == {3.0}
    assert not weights.pull(module)
    assert weights.publish(Constant(4.0)) == 1
    assert weights.publish(Constant(5.0)) == 2
    assert weights.pull(module)
    assert module.numbers() == {5.0}
    assert not weights.pull(module)
    assert (weights.version, weights.pulled_version) == (2, 2)


def test_every_attached_object_pulls_for_itself():
    weights = tr.SharedWeights(Constant(1.0))
    attached = pickle.loads(pickle.dumps(weights))
    assert weights.pull(Constant())
    module = Constant()
    assert attached.pull(module)
    attached.publish(Constant(2.0))
    assert weights.version == attached.version == 1
    assert weights.pull(module)
    assert module.numbers() == {2.0}


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    ],
)
def test_weights_of_every_dtype_shape_and_stride_come_back_bit_for_bit(dtype):
    module = nn.Module()
    values = torch.arange(24).reshape(4, 6).to(dtype)
    module.register_buffer("matrix", values.clone())
    module.register_buffer("transposed", values.t())
    module.register_buffer("strided", values[::2, 1::2])
    module.register_buffer("scalar", values[0, 1].clone())
    module.register_buffer("empty", values[:0].clone())
    target = nn.Module()
    for name, tensor in module.state_dict().items():
        target.register_buffer(name, torch.zeros_like(tensor))
    assert tr.SharedWeights(module).pull(target)
    for name, tensor in module.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)


def test_pulling_leaves_parameters_in_place_with_their_gradients_and_optimizer():
    module = Constant(1.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    address = module.first.data_ptr()
    module.first.sum().backward()
    tr.SharedWeights(Constant(2.0)).pull(module)
    assert module.first.data_ptr() == address
    assert module.first.requires_grad
    assert module.first.grad.eq(1).all()
    optimizer.step()
    assert module.first.eq(1.0).all()


def test_modules_of_another_structure_are_refused_and_nothing_is_copied():
    weights = tr.SharedWeights(Constant(1.0))
    other_dtype = Constant(9.0)
    other_dtype.first = nn.Parameter(other_dtype.first.detach().half())
    more = Constant(9.0)
    more.register_buffer("more", torch.zeros(1))
    shape = list(other_dtype.first.shape)
    for module, difference in (
        (Constant(9.0, size=7), f"first: first is torch.float32 [7], expected torch.float32 {shape}"),
        (other_dtype, f"first: first is torch.float16 {shape}, expected torch.float32 {shape}"),
        (more, "more: more is torch.float32 [1], expected none"),
    ):
        for call in (weights.publish, weights.pull):
            with pytest.raises(ValueError, match=re.escape(f"differ from those shared in {difference}; pass a module")):
                call(module)
        assert 9.0 in module.numbers()
    module = Constant()
    assert weights.pull(module)
    assert module.numbers() == {1.0}
    assert weights.version == 0


def test_a_module_without_weights_is_refused():
    with pytest.raises(ValueError, match="no weights"):
        tr.SharedWeights(nn.ReLU())


def publish_for_ever(weights, published, size):
    module = Constant(size=size)
    while True:
        number = weights.version + 1
        weights.publish(module.fill(number))
        published[0] = number


@pytest.mark.parametrize("size", [10, 300_000])
def test_a_pull_under_a_publisher_at_full_speed_is_never_torn_and_never_goes_back(size):
    weights = tr.SharedWeights(Constant(size=size))
    module = Constant(size=size)
    published = shared_counters(1)
    with Forked(publish_for_ever, weights, published, size):
        last = -1.0
        for _ in range(100):
            eventually(lambda seen=last: published[0] > seen, interval=0)
            assert weights.pull(module)
            (number,) = module.numbers()
            assert number > last
            last = number


def test_a_publisher_killed_in_the_middle_leaves_the_last_publication_and_the_lock_free():
    size = 300_000
    weights = tr.SharedWeights(Constant(size=size))
    module = Constant(size=size)
    published = shared_counters(1)
    chance = random.Random(0)
    for _ in range(30):
        published[0] = 0
        with Forked(publish_for_ever, weights, published, size):
            target = chance.randrange(1, 4)
            eventually(lambda enough=target: published[0] >= enough, interval=0)
        weights.pull(module)
        (number,) = module.numbers()
        assert number == weights.version
        assert weights.publish(module.fill(number + 1)) == number + 1


def publish_times(weights, times):
    module = Constant()
    for _ in range(times):
        weights.publish(module)


def test_publications_of_several_processes_are_all_counted():
    weights = tr.SharedWeights(Constant())
    with Forked(publish_times, weights, 200) as first, Forked(publish_times, weights, 200) as second:
        assert (first.wait(), second.wait()) == (0, 0)
    assert weights.version == 400


class Behind:
    """The native object of shared weights, after some of whose calls something happens."""

    def __init__(self, native, **calls):
        self._native, self._calls = native, calls

    def __getattr__(self, name):
        def called(*args):
            result = getattr(self._native, name)(*args)
            self._calls[name]()
            return result

        return called if name in self._calls else getattr(self._native, name)


@pytest.fixture
def ctrl_c():
    """SIGINT is Ctrl-C, also where this process was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_between_the_lock_and_the_copy_leaves_the_lock_free():
    weights = tr.SharedWeights(Constant())
    native = weights._native
    weights._native = Behind(native, begin_publish=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        weights.publish(Constant(1.0))
    assert native.publisher == 0
    weights._native = native
    assert weights.publish(Constant(2.0)) == 1


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_at_the_end_of_a_pull_leaves_no_other_module_with_older_weights():
    class Interrupted(tr.SharedWeights):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if (name, value) == ("_pulled", 1):
                signal.raise_signal(signal.SIGINT)

    weights = Interrupted(Constant(0.0))
    first, second = Constant(), Constant()
    assert weights.pull(first)
    weights.publish(Constant(1.0))
    with pytest.raises(KeyboardInterrupt):
        weights.pull(second)
    weights.__class__ = tr.SharedWeights
    assert weights.pull(first)
    assert first.numbers() == {1.0}
    assert not weights.pull(first)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_wait_for_another_publisher_leaves_the_lock_to_it(monkeypatch):
    weights = tr.SharedWeights(Constant())
    other = pickle.loads(pickle.dumps(weights))
    locked, go_on = threading.Event(), threading.Event()
    attempts = Behind(weights._native, begin_publish=lambda: signal.raise_signal(signal.SIGINT))
    publisher = threading.Thread(target=hold_lock, args=(other, locked.set, go_on.wait))
    publisher.start()
    locked.wait(30)
    monkeypatch.setattr(weights, "_native", attempts)
    with pytest.raises(KeyboardInterrupt):
        weights.publish(Constant(1.0))
    assert other._native.publisher == publisher.native_id
    go_on.set()
    publisher.join()
    assert other.version == 1


def test_a_signals_handler_does_not_end_a_publication_that_it_has_interrupted():
    weights = tr.SharedWeights(Constant())
    other = pickle.loads(pickle.dumps(weights))
    native, refused = weights._native, []

    def publish(*_):
        for one in (weights, other):
            with pytest.raises(RuntimeError, match="this thread is publishing these weights already"):
                one.publish(Constant(1.0))
        refused.append(native.publisher)

    before = signal.signal(signal.SIGUSR2, publish)
    try:
        weights._native = Behind(native, begin_publish=lambda: signal.raise_signal(signal.SIGUSR2))
        assert weights.publish(Constant(2.0)) == 1
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert refused == [threading.get_native_id()]
    module = Constant()
    assert other.pull(module)
    assert (module.numbers(), other.pulled_version) == ({2.0}, 1)


def hold_lock(weights, begun, wait):
    assert weights._native.begin_publish(1_000_000_000)
    begun()
    wait()
    weights._native.end_publish(True)


def test_a_publisher_that_waits_in_vain_says_whether_the_other_is_a_thread_of_its_own_process(monkeypatch):
    monkeypatch.setattr("torchreplay.weights.shared_weights.PUBLISH_SECONDS", 0.1)
    weights = tr.SharedWeights(Constant())
    locked, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold_lock, args=(weights, locked.set, go_on.wait))
    thread.start()
    locked.wait(30)
    with pytest.raises(tr.ReplayTimeout, match=f"thread {thread.native_id} of this process has been publishing"):
        weights.publish(Constant())
    go_on.set()
    thread.join()
    begun = shared_counters(1)
    with Forked(hold_lock, weights, lambda: begun.__setitem__(0, os.getpid()), signal.pause):
        eventually(lambda: begun[0] > 0)
        with pytest.raises(tr.ReplayTimeout, match=f"thread {begun[0]} of another process has been publishing"):
            weights.publish(Constant())
    assert weights.publish(Constant()) == 2


def test_publish_returns_its_own_version_although_another_publisher_follows_at_once():
    weights = tr.SharedWeights(Constant())
    other = pickle.loads(pickle.dumps(weights))
    weights._native = Behind(weights._native, end_publish=lambda: other.publish(Constant(2.0)))
    assert (weights.publish(Constant(1.0)), weights.version) == (1, 2)


@pytest.mark.parametrize("version", [0, 1, 2, 3, 8, 9])
def test_weights_go_on_from_a_later_version_as_they_are(version):
    weights = tr.SharedWeights(Constant(1.0))
    weights.publish(Constant(2.0))
    reader, module = pickle.loads(pickle.dumps(weights)), Constant()
    go_on_from(weights, version)
    newest = max(version, 1)
    assert reader.pull(module)
    assert (reader.version, reader.pulled_version, module.numbers()) == (newest, newest, {2.0})
    assert weights.publish(Constant(3.0)) == newest + 1
    assert reader.pull(module)
    assert (reader.pulled_version, module.numbers()) == (newest + 1, {3.0})


def test_a_reader_gets_whole_weights_while_their_version_jumps():
    weights = tr.SharedWeights(Constant(0.0, 20_000))
    over = threading.Event()

    def publish():
        for number in range(1, 60):
            go_on_from(weights, weights.version + number % 5)
            weights.publish(Constant(float(number), 20_000))
        over.set()

    thread = threading.Thread(target=publish)
    thread.start()
    reader, module, last = pickle.loads(pickle.dumps(weights)), Constant(0.0, 20_000), 0.0
    while not over.is_set():
        reader.pull(module)
        [number] = module.numbers()
        assert number >= last
        last = number
    thread.join()


def test_repr_tells_version_and_size():
    assert repr(tr.SharedWeights(nn.Linear(2, 2))).startswith("SharedWeights(version 0, 2 tensors")


def test_a_pull_into_another_module_copies_even_when_nothing_is_newer():
    weights = tr.SharedWeights(nn.Linear(3, 2))
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    assert [weights.pull(first), weights.pull(first), weights.pull(second)] == [True, False, True]
    assert torch.equal(first.weight, second.weight)


def test_a_weight_that_is_no_plain_tensor_is_named():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(ValueError, match="the weight '_extra_state' is dict"):
        tr.SharedWeights(Extra(3, 2))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.eye(3).to_sparse(), "torch.sparse_coo, torch.float32 on cpu"),
        (torch.nested.nested_tensor([[1.0], [1.0, 2.0]], layout=torch.jagged), "nested, torch.float32 on cpu"),
        (torch.zeros(3, dtype=torch.complex64), "torch.complex64 on cpu"),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), "torch.float8_e4m3fn on cpu"),
        (torch.zeros(3, device="meta"), "torch.float32 on meta"),
    ],
)
def test_a_weight_that_cannot_be_shared_is_named_with_what_can_be(value, what):
    module = nn.Linear(3, 2)
    module.register_buffer("odd", value)
    check_refused(module, "odd", what)


def test_a_module_that_has_seen_no_input_yet_is_refused():
    check_refused(nn.LazyLinear(2), "weight", "not initialized yet, for its module has seen no input")


def check_refused(module, name, what):
    weights = tr.SharedWeights(nn.Linear(3, 2))
    expected = "expected a dense tensor with memory, of one of bool, uint8, .*, bfloat16, float32, float64"
    for call in (tr.SharedWeights, weights.publish, weights.pull):
        with pytest.raises(ValueError, match=f"the weight '{name}' is {what}: {expected}"):
            call(module)
