"""Batches on their way to a device: drawn into slots, copied ahead, and the same as without; no CUDA is needed here."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from delayed_draws import BATCH, ROWS, assert_same, extend, filled_buffer, td_of
from forked import Forked
from late_copies import LateCopies, StagedDataset
from numbered_episodes import spec, write_calls
from numbered_items import VIEWS
from torch.utils.data import DataLoader

import torchreplay as tr
from torchreplay.cuda.packing import DRAWN, Packing, batch_of
from torchreplay.loading import destination
from torchreplay.schema.spec import ELEMENTS, flatten

SPARE = 3


def drawn_all(dataset):
    """Waits until all that was ordered is drawn."""
    dataset.state_dict()


def learn(buffer, batches, n, first=0):
    """Feeds back beside drawing; returns what was handed out, not yet looked at."""
    seen = []
    for k, batch in enumerate(itertools.islice(batches, n), start=first):
        seen.append(batch)
        buffer.update_priorities(batch["key"].clone(), td_of(k))
        if k % 3 == 0:
            extend(buffer, ROWS + 16 * k, 16)
    return seen


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_batches_are_those_without_a_device_although_copies_run_as_late_as_they_can(prefetch):
    expected = learn(buffer := filled_buffer(), tr.ReplayDataset(buffer, BATCH, prefetch=prefetch), 100)
    staged = StagedDataset(buffer := filled_buffer(), BATCH, prefetch=prefetch)
    given = learn(buffer, staged, 100)
    staged.copies.run()
    assert_same(given, expected)
    assert [list(batch) for batch in given] == [list(batch) for batch in expected]
    assert {batch.source for batch in given} == {buffer._nonce}
    assert len(staged.copies.blocks) <= prefetch + 1 + SPARE


@pytest.mark.parametrize("name", VIEWS)
def test_items_of_every_view_come_packed_in_one_copy(name):
    def make():
        buffer = tr.ReplayBuffer(spec(), 512, sampler=tr.Prioritized(), view=VIEWS[name].view, seed=3)
        write_calls(buffer, 0, 400)
        return buffer

    expected = list(tr.ReplayDataset(make(), 16, steps=20))
    staged = StagedDataset(make(), 16, steps=20)
    given = list(staged)
    assert len(staged.copies.started) == 20
    staged.copies.run()
    assert_same(given, expected)


def test_the_next_batch_is_copied_when_one_is_handed_out():
    staged = StagedDataset(filled_buffer(), BATCH, steps=4, prefetch=2)
    iterator = iter(staged)
    next(iterator)
    for k in range(2, 5):
        drawn_all(staged)
        next(iterator)
        assert len(staged.copies.started) == min(k + 1, 4)
    assert next(iterator, None) is None


def test_a_slot_is_used_again_once_its_copy_has_ended_and_nobody_waits_before_all_are_under_way():
    staged = StagedDataset(filled_buffer(), BATCH, prefetch=2)
    iterator = iter(staged)
    for _ in range(50):
        next(iterator)
        staged.copies.run()
    assert staged.copies.waits == 0
    assert len(staged.copies.blocks) <= 2 + 2
    slow = StagedDataset(filled_buffer(), BATCH, prefetch=2)
    iterator = iter(slow)
    for k in range(1, 30):
        next(iterator)
        assert len(slow.copies.pending()) <= 2 + 1 + SPARE
        assert (slow.copies.waits > 0) == (k > SPARE + 1)
    assert len(slow.copies.blocks) == 2 + 1 + SPARE


def test_an_iteration_goes_on_where_its_state_was_taken_and_what_was_copied_ahead_is_not_handed_out(tmp_path):
    buffer = filled_buffer()
    dataset = StagedDataset(buffer, BATCH, prefetch=3)
    iterator = iter(dataset)
    learn(buffer, iterator, 10)
    drawn_all(dataset)
    learn(buffer, iterator, 1, first=10)
    assert len(dataset.copies.started) == 12
    buffer.save(tmp_path / "buffer")
    state = dataset.state_dict()
    assert (state["draws"], len(state["drawn"])) == (11, 3)
    expected = learn(buffer, iterator, 30)
    dataset.copies.run()
    loaded = tr.ReplayBuffer.load(tmp_path / "buffer")
    resumed = StagedDataset(loaded, BATCH, prefetch=3)
    resumed.load_state_dict(state)
    given = learn(loaded, resumed, 30)
    resumed.copies.run()
    assert_same(given, expected)


def test_what_was_copied_ahead_and_not_handed_out_has_not_been_drawn():
    buffer = filled_buffer()
    dataset = StagedDataset(buffer, BATCH, prefetch=3)
    iterator = iter(dataset)
    next(iterator)
    drawn_all(dataset)
    next(iterator)
    assert len(dataset.copies.started) == 3
    iterator.close()
    assert buffer.draws == 2
    assert (buffer.stats().draws, buffer.stats().sampled) == (2, 2 * BATCH)


def test_the_staleness_is_that_of_the_batches_handed_out():
    buffer, prefetch, n = filled_buffer(), 3, 50
    for k, batch in enumerate(StagedDataset(buffer, BATCH, steps=n, prefetch=prefetch)):
        buffer.update_priorities(batch, td_of(k))
    assert buffer.stats().staleness == sum(BATCH * min(k, prefetch) for k in range(n)) / n


def hindsight_buffer(compute_reward):
    goals = {"achieved_goal": tr.Field((1,)), "desired_goal": tr.Field((1,))}
    spec = {"obs": goals, "reward": tr.Field()} | {end: tr.Field((), torch.bool) for end in ("terminated", "truncated")}
    view = tr.Hindsight(compute_reward, compute_terminated=lambda achieved, desired: (achieved == desired).squeeze(1))
    buffer = tr.ReplayBuffer(spec, 512, view=view, seed=3)
    with buffer.writer() as writer:
        for episode in range(10):
            writer.reset(obs={"achieved_goal": np.array([100.0 * episode]), "desired_goal": np.array([-1.0])})
            for step in range(1, 21):
                obs = {"achieved_goal": np.array([100.0 * episode + step]), "desired_goal": np.array([-1.0])}
                writer.step(obs=obs, reward=-1.0, terminated=False, truncated=step == 20)
    return buffer


def distance(achieved, desired):
    return -(achieved - desired).abs().squeeze(1)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_what_a_view_computes_goes_along(prefetch):
    expected = list(tr.ReplayDataset(hindsight_buffer(distance), 64, steps=20, prefetch=prefetch))
    calls = []
    staged = StagedDataset(
        hindsight_buffer(lambda *goals: calls.append(1) or distance(*goals)), 64, steps=20, prefetch=prefetch
    )
    given = []
    for batch in staged:
        given.append(batch)
        drawn_all(staged)
    staged.copies.run()
    assert any(batch["relabelled"].any() for batch in given)
    assert_same(given, expected)
    assert len(calls) == 20


def test_an_error_of_a_users_function_comes_with_the_batch_that_it_was_computed_for():
    calls = []

    def fails_on_the_third(achieved, desired):
        calls.append(1)
        if len(calls) >= 3:
            raise ZeroDivisionError
        return distance(achieved, desired)

    staged = StagedDataset(hindsight_buffer(fails_on_the_third), 8, prefetch=2)
    iterator = iter(staged)
    next(iterator)
    drawn_all(staged)
    next(iterator)
    with pytest.raises(ZeroDivisionError):
        next(iterator)


def test_keys_and_what_is_on_the_device_stay_whatever_is_drawn_after_them():
    dataset = StagedDataset(filled_buffer(), BATCH, steps=100, prefetch=2)
    kept = []
    for batch in dataset:
        dataset.copies.run()
        kept.append((batch, batch["key"].clone()))
    for batch, key in kept:
        assert torch.equal(batch["key"], key)
        assert torch.equal(batch["number"], key)  # the row with key k holds k
        assert torch.equal(batch["obs"], key[:, None].expand(-1, 4).float())


def test_a_loader_passes_the_batches_on():
    dataset = StagedDataset(filled_buffer(), BATCH, steps=5)
    given = list(DataLoader(dataset, batch_size=None))
    dataset.copies.run()
    assert_same(given, list(tr.ReplayDataset(filled_buffer(), BATCH, steps=5)))


def test_a_default_device_of_the_users_changes_nothing():
    dataset = StagedDataset(filled_buffer(), BATCH, steps=5)
    with torch.device("meta"):
        given = list(dataset)
    dataset.copies.run()
    assert_same(given, list(tr.ReplayDataset(filled_buffer(), BATCH, steps=5)))


@pytest.mark.parametrize("steps", [None, 2])  # without an end, and with no batch left to order
def test_a_forked_child_is_told_to_begin_an_iteration_of_its_own(steps):
    dataset = StagedDataset(filled_buffer(), BATCH, steps, prefetch=2)
    iterator = iter(dataset)
    next(iterator)

    def go_on():
        with pytest.raises(RuntimeError, match="does not survive a fork: begin another"):
            next(iterator)
        dataset.copies = LateCopies()
        next(iter(dataset))

    with Forked(go_on) as child:
        assert child.wait() == 0
    next(iterator)


# Values of any length.

TEXTS = {
    "tokens": tr.Ragged(torch.int32),
    "number": tr.Field((), torch.int64),
    "logprob": tr.Ragged(torch.bfloat16, like="tokens"),
    "obs": {"points": tr.Ragged(torch.float32, (3,)), "n": tr.Field()},
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}
OF_TEXTS = {
    "rows": tr.Rows(),
    "transitions": tr.Transitions(n_step=2),
    "stacks": tr.Transitions(stack={"obs/points": 3}),
    "sequences": tr.Sequences(4),
    "windows of one": tr.Sequences(1),
}


def texts(view, rows=120, longest=20, **options):
    """Returns a buffer of episodes of ten steps, whose values say in which row they are."""
    random = np.random.default_rng(5)
    buffer = tr.ReplayBuffer(TEXTS, 256, ragged_bytes=1 << 20, view=view, seed=3, **options)
    values = []
    for n in range(rows):
        tokens, points = (np.full(random.integers(0, longest), n, np.int32) for _ in range(2))
        obs = {"points": np.repeat(points[:, None], 3, axis=1).astype(np.float32), "n": float(n)}
        ends = {"terminated": n % 10 == 9, "truncated": False}
        values.append({"tokens": tokens, "number": n, "logprob": tokens / 256, "obs": obs, "reward": 1.0} | ends)
    with buffer.writer() as writer:
        for n, row in enumerate(values):
            if isinstance(view, tr.Rows):
                writer.append(**row)
            elif n % 10 == 0:
                writer.reset(obs=row["obs"])
            else:
                writer.step(**row)
    return buffer


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", OF_TEXTS)
def test_values_of_any_length_come_by_one_more_copy_of_what_is_used(name, prefetch):
    expected = list(tr.ReplayDataset(texts(OF_TEXTS[name]), 16, steps=20, prefetch=prefetch))
    staged = StagedDataset(texts(OF_TEXTS[name]), 16, steps=20, prefetch=prefetch)
    given = list(staged)
    staged.copies.run()
    assert_same(given, expected)
    assert len(staged.copies.started) == 2 * 20
    assert [list(batch) for batch in given] == [list(batch) for batch in expected]
    used = [len(copy.there) for copy in staged.copies.started[1::2]]
    for batch, own, nbytes in zip(given, expected, used, strict=True):
        ragged = [own["tokens"], own["logprob"], own["obs"]["points"]]
        assert nbytes >= sum(values.numel() * values.element_size() for values in ragged)
        assert batch.offsets("tokens") is batch.offsets("logprob")
        assert batch.offsets("tokens").untyped_storage().data_ptr() == batch["tokens"].untyped_storage().data_ptr()
        assert batch["lengths"]["tokens"].untyped_storage().data_ptr() != batch["tokens"].untyped_storage().data_ptr()
    assert len(set(used)) > 1


def test_the_block_for_values_grows_to_the_largest_batch_and_then_no_more():
    buffer = texts(tr.Rows())
    staged = StagedDataset(buffer, 16, prefetch=2)
    batches = iter(staged)
    for _ in range(40):
        next(batches)
        staged.copies.run()
    small = len(staged.copies.blocks)
    buffer.extend(**row_of_ones(5000))
    assert buffer.gather([120]).lengths("tokens").tolist() == [5000]
    largest = 0
    for _ in range(60):
        largest = max(largest, len(next(batches)["tokens"]))
        staged.copies.run()
    assert largest > 5000
    grown = len(staged.copies.blocks)
    for _ in range(60):
        batch = next(batches)
        staged.copies.run()
        assert len(batch["tokens"]) == batch.lengths("tokens").sum()
    assert small < grown
    assert len(staged.copies.blocks) <= grown + 4  # where two long values come in one batch
    assert max(map(len, staged.copies.blocks)) < 4 * 4 * 5000 * (4 + 2 + 12)


def row_of_ones(length):
    ones = np.ones(length, np.int32)
    obs = {"points": [np.ones((length, 3), np.float32)], "n": [1.0]}
    ends = {"terminated": [False], "truncated": [False]}
    return {"tokens": [ones], "number": [1], "logprob": [ones / 256], "obs": obs, "reward": [1.0]} | ends


@pytest.mark.parametrize("view", [tr.Rows(), tr.Sequences(4)], ids=repr)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_with_a_budget_the_block_for_values_has_its_size_from_the_start(view, prefetch):
    budget = {"logprob": 120, "obs/points": 300}
    if isinstance(view, tr.Sequences):
        budget |= {"tokens": 250}
    expected = list(tr.ReplayDataset(texts(view), 16, steps=40, prefetch=prefetch, budget=budget))
    staged = StagedDataset(texts(view), 16, steps=40, prefetch=prefetch, budget=budget)
    given = []
    for batch in staged:
        given.append(batch)
        staged.copies.run()
    assert_same(given, expected)
    assert len({len(batch["key"]) for batch in given}) > 1
    sizes = [len(block) for block in staged.copies.blocks]
    assert len(set(sizes)) == 2
    assert len(sizes) % 2 == 0  # no slot got another block
    assert max(sizes) < 200 * (4 + 2) + 300 * 12 + 16 * 5 * 3 * 12 + 9 * 256 + 64 * 16


def test_items_that_a_budget_leaves_out_are_nothing_to_a_users_function():
    goals = {"achieved_goal": tr.Field((1,)), "desired_goal": tr.Field((1,))}
    ends = {end: tr.Field((), torch.bool) for end in ("terminated", "truncated")}
    spec = {"obs": goals, "reward": tr.Field(), "said": tr.Ragged(torch.uint8)} | ends
    seen = []

    def reward(achieved, desired):
        seen.append(torch.cat([achieved, desired]))
        return distance(achieved, desired)

    def make(compute):
        buffer = tr.ReplayBuffer(spec, 512, ragged_bytes=1 << 16, view=tr.Hindsight(compute), seed=3)
        with buffer.writer() as writer:
            for episode in range(10):
                writer.reset(obs={"achieved_goal": [5.0 * episode], "desired_goal": [-1.0]})
                for step in range(1, 9):
                    obs = {"achieved_goal": [5.0 * episode + step], "desired_goal": [-1.0]}
                    end = {"terminated": False, "truncated": step == 8}
                    writer.step(obs=obs, reward=-1.0, said=b"x" * (step * episode % 7), **end)
        return buffer

    for prefetch in (0, 2):
        expected = list(tr.ReplayDataset(make(distance), 32, steps=20, prefetch=prefetch, budget={"said": 50}))
        staged = StagedDataset(make(reward), 32, steps=20, prefetch=prefetch, budget={"said": 50})
        given = list(staged)
        staged.copies.run()
        assert_same(given, expected)
        assert min(len(batch["key"]) for batch in given) < 32
    assert torch.cat(seen).ge(-1).all()
    assert torch.cat(seen).le(5.0 * 9 + 8).all()


def test_a_state_with_values_of_any_length_goes_on_where_it_was_taken():
    staged = StagedDataset(texts(tr.Rows()), 16, prefetch=2, budget={"tokens": 200})
    batches = iter(staged)
    for _ in range(5):
        next(batches)
    state = staged.state_dict()
    expected = [next(batches) for _ in range(10)]
    staged.copies.run()
    resumed = StagedDataset(texts(tr.Rows()), 16, prefetch=2, budget={"tokens": 200})
    resumed.load_state_dict(state)
    given = list(itertools.islice(resumed, 10))
    resumed.copies.run()
    assert_same(given, expected)


def packed(n=6):
    spec = {"obs": {"image": tr.Field((3, 5), torch.uint8)}, "flag": tr.Field((), torch.bool), "x": tr.Field((2,))}
    fields = flatten(spec | {"half": tr.Field((), torch.bfloat16), "wide": tr.Field((7,), torch.float64)})
    packing = Packing(fields | DRAWN, n)
    return packing, torch.zeros(packing.nbytes, dtype=torch.uint8)


def test_tensors_of_a_block_lie_apart_aligned_and_inside():
    packing, block = packed()
    places = []
    for path, tensor in packing.tensors(block).items():
        start = tensor.data_ptr() - block.data_ptr()
        assert start % 256 == 0, path
        assert tensor.is_contiguous()
        places.append((start, start + tensor.numel() * tensor.element_size()))
    places.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    assert places[-1][1] <= packing.nbytes
    batch = batch_of(packing.tensors(block), torch.zeros(6, dtype=torch.int64))
    assert [list(batch), batch["obs"]["image"].shape] == [
        ["obs", "flag", "x", "half", "wide", "key", "weight", "probability"],
        (6, 3, 5),
    ]
    batch["x"].fill_(1.0)
    assert block.count_nonzero() == 2 * 6 * 2  # of 1.0f, two bytes are not 0


def test_tensors_of_every_dtype_are_those_that_numpy_finds_in_the_block():
    fields = {(str(k),): tr.Field((2, 3), dtype) for k, dtype in enumerate(ELEMENTS)}
    packing = Packing(fields, 5)
    block = torch.arange(packing.nbytes).to(torch.uint8)
    raw, start = block.numpy().tobytes(), 0
    for (name,), tensor in packing.tensors(block).items():
        field = fields[name,]
        assert (tensor.dtype, tensor.shape) == (field.dtype, (5, 2, 3))
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == raw[start : start + 5 * field.nbytes]
        start += -(-5 * field.nbytes // 256) * 256
    with pytest.raises(ValueError, match="block is not a contiguous vector of uint8"):
        packing.tensors(block.view(torch.int64))


def test_a_tensor_changed_in_place_is_nothing_to_a_graph_that_holds_another_one_of_the_batch():
    tensors = packed()[0].tensors(packed()[1])
    x, weight = tensors[("x",)], tensors[("weight",)]
    loss = (x * torch.ones(2, requires_grad=True)).sum()
    weight.fill_(2.0)
    loss.backward()
    assert x._version == 0


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([1, 0], "ends in the midst of a place"),
        ([13, 0, 0], "names dtype 13, expected 0 to 12"),
        ([-1, 0, 0], "names dtype -1"),
        ([1, 0, 2, 4, 4], "no place of 2 dimensions"),
        ([1, 0, -1], "no place of -1 dimensions"),
        ([1, 0, 2**62, 4], f"no place of {2**62} dimensions"),
        ([1, -1, 1, 4, 1], "no place"),
        ([1, 0, 1, -4, 1], "negative size or stride"),
        ([1, 0, 1, 4, -1], "negative size or stride"),
        ([1, 61, 1, 4, 1], "beyond a block of 64 elements"),
        ([1, 65, 1, 0, 1], "beyond a block of 64 elements"),
        ([1, 2**63 - 1, 1, 0, 1], "beyond a block of 64 elements"),
        ([11, 15, 1, 2, 1], "beyond a block of 16 elements"),
        ([1, 64, 0], "beyond"),
        ([1, 0, 2, 2**62, 2**62, 2**62, 1], "beyond"),
    ],
)
def test_places_outside_of_a_block_are_refused(places, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.torchreplay._unpack(torch.zeros(64, dtype=torch.uint8), torch.tensor(places))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (torch.zeros(1, dtype=torch.uint8).expand(64), "not a contiguous vector of uint8"),
        (torch.zeros(63, dtype=torch.uint8), "63 bytes from 0 on, and values of 4 bytes"),
        (torch.zeros(65, dtype=torch.uint8)[1:], "64 bytes from 1 on, and values of 4 bytes"),
    ],
)
def test_blocks_that_are_none_are_refused(block, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.torchreplay._unpack(block, torch.tensor([11, 0, 1, 4, 1]))


class PromptCopies(LateCopies):
    """Copies that have run when they have started."""

    def start(self, block):
        copy = super().start(block)
        self.run()
        return copy


def test_a_compiled_loop_learns_from_batches_on_their_way():
    dataset = StagedDataset(filled_buffer(), BATCH, steps=6)
    dataset.copies = PromptCopies()
    expected = [batch["obs"].sum().item() for batch in tr.ReplayDataset(filled_buffer(), BATCH, steps=6)]

    @torch.compile(backend="eager")
    def total(batches):
        return next(batches)["obs"].sum()

    batches = iter(dataset)
    try:
        assert [total(batches).item() for _ in range(6)] == expected
    finally:
        batches.close()
        torch.compiler.reset()


def test_cuda_without_a_device_is_refused_with_the_way_out():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match=r"device is 'cuda:1', and torch .* CUDA.*; give device=None"):
        tr.ReplayDataset(filled_buffer(), BATCH, device="cuda:1")


@pytest.fixture
def two_devices(monkeypatch):
    """torch says that there are two CUDA devices."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_devices")
def test_a_cuda_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device is 'cuda:2': this machine has CUDA devices 0 to 1"):
        tr.ReplayDataset(filled_buffer(), BATCH, device="cuda:2")


@pytest.mark.usefixtures("two_devices")
def test_pinning_is_by_default_staging_for_cuda_and_nothing_elsewhere():
    buffer = filled_buffer()
    assert tr.ReplayDataset(buffer, device="cuda").pin == "staging"
    assert tr.ReplayDataset(buffer, device="cuda:1", pin="off").pin == "off"
    assert tr.ReplayDataset(buffer).pin == tr.ReplayDataset(buffer, device="cpu").pin == "off"
    with pytest.raises(ValueError, match="pin is 'on': expected one of 'staging', 'ring', 'off'"):
        tr.ReplayDataset(buffer, device="cuda", pin="on")
    for device in (None, "cpu"):
        with pytest.raises(ValueError, match=f"copies to a CUDA device, and device is {device}"):
            tr.ReplayDataset(buffer, device=device, pin="staging")


@pytest.mark.usefixtures("two_devices")
def test_a_loaders_worker_is_refused_a_cuda_device(monkeypatch):
    monkeypatch.setattr(destination, "get_worker_info", lambda: SimpleNamespace(id=0, num_workers=1))
    with pytest.raises(RuntimeError, match=r"in a worker of a DataLoader: .* Leave num_workers at 0"):
        next(iter(tr.ReplayDataset(filled_buffer(), BATCH, device="cuda")))
    with pytest.raises(RuntimeError, match=r"MixedDataset\(device='cuda'\) in a worker of a DataLoader"):
        next(iter(tr.MixedDataset({filled_buffer(): 1, filled_buffer(): 1}, BATCH, device="cuda")))


@pytest.mark.usefixtures("two_devices")
def test_the_buffers_memory_is_page_locked_for_the_ring_alone(monkeypatch):
    monkeypatch.setattr("torchreplay.buffer.local_source.DeviceCopies", lambda device: LateCopies())
    locked = []
    for pin in ("staging", "off", "ring"):
        buffer = filled_buffer()
        buffer._sampler.lock_pages = lambda registry, pin=pin: locked.append(pin) or SimpleNamespace(held=False)
        if pin != "off":
            next(iter(tr.ReplayDataset(buffer, BATCH, device="cuda", pin=pin)))
    assert locked == ["ring"]
