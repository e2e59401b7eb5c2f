"""The buffer as an object: its own description, its open memory, and the end of its life."""

import copy
import dataclasses
import json
import os
import pickle
import threading
import time
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from forked import Forked, eventually

import torchreplay as tr
from torchreplay.segment import waits

SPEC = {"x": tr.Field((4,)), "deep": {"n": tr.Field((), torch.int64), "wide": tr.Field((600,), torch.float64)}}


def make(capacity=10, **options):
    return tr.ReplayBuffer(SPEC, capacity, **{"seed": 0, **options})


def rows(start, n):
    index = np.arange(start, start + n)
    return {"x": np.tile(index[:, None], 4), "deep": {"n": index, "wide": np.tile(index[:, None], 600)}}


def write(buffer, start, n):
    return buffer.extend(**rows(start, n))


def test_defaults_are_uniform_draws_of_rows_from_the_first_one_on():
    buffer = make()
    assert (buffer.sampler, buffer.view, buffer.limiter) == (tr.Uniform(), tr.Rows(), tr.MinSize(1))
    assert (buffer.capacity, len(buffer), buffer.draws, buffer.stopped) == (10, 0, 0, False)


def test_len_counts_the_rows_held_up_to_the_capacity():
    buffer = make()
    lengths = []
    for start in range(0, 16, 2):
        write(buffer, start, 2)
        lengths.append(len(buffer))
    assert lengths == [2, 4, 6, 8, 10, 10, 10, 10]
    with Forked(write, buffer, 0, 3) as child:
        assert child.wait() == 0
    assert len(buffer) == 10


@pytest.mark.parametrize("spec", [SPEC, {"x": tr.Field()}, {"x": tr.Field((5000,), torch.uint8)}], ids=str)
def test_nbytes_is_the_payload_and_little_more(spec):
    buffer = tr.ReplayBuffer(spec, 10_000)
    payload = sum(field.nbytes for field in leaves_of(spec))
    overhead = buffer.nbytes - 10_000 * payload
    # A row's header is 12 bytes, its record begins at a cache line, and the tree needs about 16 bytes a row.
    assert 10_000 * 12 < overhead < 10_000 * (12 + 63 + 63 + 16) + 200_000
    assert buffer.nbytes <= os.stat(f"/proc/self/fd/{buffer.handle().fd}").st_size < buffer.nbytes + 2**12
    assert buffer.stats().nbytes == tr.ReplayBuffer.attach(buffer.handle()).nbytes == buffer.nbytes


def leaves_of(spec):
    for value in spec.values():
        yield from leaves_of(value) if isinstance(value, dict) else [value]


def test_a_new_buffer_has_its_memory_already():
    # Reserved, not promised: running out of memory later would end the process.
    buffer = make(10_000)
    blocks = os.stat(f"/proc/self/fd/{buffer.handle().fd}").st_blocks
    assert blocks * 512 >= buffer.nbytes


# Stats


def test_stats_are_plain_frozen_scalars_ready_for_json():
    buffer = make(sampler=tr.Prioritized())
    write(buffer, 0, 3)
    buffer.update_priorities(buffer.sample(4), np.full(4, 2.5))
    stats = buffer.stats()
    assert json.loads(json.dumps(stats.as_dict(), allow_nan=False)) == stats.as_dict()
    assert list(stats.as_dict()) == [field.name for field in dataclasses.fields(stats)]
    for name, value in stats.as_dict().items():
        assert type(value).__name__ == tr.Stats.__annotations__[name]
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.size = 5


def test_stats_count_what_was_done_by_anyone():
    buffer = make(sampler=tr.Prioritized(alpha=1.0, eps=1e-9))
    other = tr.ReplayBuffer.attach(buffer.handle())
    assert buffer.stats() == tr.Stats(
        **dict.fromkeys(("size", "drawable", "inserted", "sampled", "draws", "updated", "stale_updates"), 0),
        **dict.fromkeys(("unready_updates", "redraws", "writers", "learners", "rows_written", "dropped_rows"), 0),
        evicted_unsampled=0,
        held_items=0,
        dropped_items=0,
        oldest_age=-1.0,
        policy_version=0,
        age_mean=0.0,
        age_max=0,
        expired_items=0,
        **dict.fromkeys(("admitted_items", "admission_limit", "open_admissions"), 0),
        evicted_by_pages=0,
        ragged_bytes=0,
        ragged_fill=0.0,
        priority_change=0.0,
        **dict.fromkeys(
            ("staleness", "samples_per_insert", "priority_total", "priority_min", "insert_wait", "sample_wait"), 0.0
        ),
        **dict.fromkeys(("insert_wait_share", "sample_wait_share"), 0.0),
        capacity=10,
        nbytes=buffer.nbytes,
        priority_max=1.0,
        last_write_age=-1.0,
        stopped=False,
    )
    keys = write(buffer, 0, 10)
    assert len(buffer) == 10  # an item that nobody looked at before it was overwritten never became one
    with Forked(write, buffer, 10, 2) as child:
        assert child.wait() == 0
    buffer.sample(6)
    other.sample(8)
    other.update_priorities(keys, torch.full((10,), -0.5))  # two of them overwritten
    buffer.update_priorities(keys[-1:], torch.tensor([3.0]))
    stats = other.stats()
    assert dataclasses.replace(buffer.stats(), last_write_age=stats.last_write_age) == stats
    counts = (stats.size, stats.drawable, stats.inserted, stats.rows_written, stats.sampled, stats.draws)
    assert counts == (10, 10, 12, 12, 14, 2)
    assert (stats.updated, stats.stale_updates, stats.unready_updates) == (9, 2, 0)
    assert stats.samples_per_insert == pytest.approx(14 / 12)
    # Seven rows of 0.5, one of 3, and the two written later at the largest priority of their time.
    assert stats.priority_total == pytest.approx(7 * 0.5 + 3 + 2 * 1.0, rel=1e-6)
    assert (stats.priority_min, stats.priority_max) == (pytest.approx(0.5), pytest.approx(3.0))
    assert (stats.writers, stats.learners, stats.stopped) == (1, 2, False)


def test_the_age_of_the_last_write_grows_until_the_next_one():
    buffer = make()
    begin = time.monotonic()
    write(buffer, 0, 1)
    first = buffer.stats().last_write_age
    while (second := buffer.stats().last_write_age) < 0.1:
        assert time.monotonic() - begin < 30
    assert 0 <= first < second <= time.monotonic() - begin + 0.02  # the clock's resolution, twice
    write(buffer, 0, 1)
    end = time.monotonic()
    assert buffer.stats().last_write_age <= time.monotonic() - end + 0.02


def test_the_last_write_is_known_when_a_learner_has_the_place_of_the_writer_that_left():
    buffer = make()
    with buffer.writer() as writer:
        writer.extend(**rows(0, 2))
    buffer.sample(1)
    assert (buffer.stats().writers, buffer.stats().learners) == (0, 1)
    assert buffer.stats().last_write_age >= 0


def looks(buffer):
    return [buffer.stats, buffer.histograms, lambda: buffer.storage, lambda: repr(buffer), lambda: len(buffer)]


def test_looking_changes_nothing_that_is_drawn_or_counted():
    watched, unwatched = make(sampler=tr.Prioritized()), make(sampler=tr.Prioritized())
    for start in range(12):
        drawn = []
        for buffer in (watched, unwatched):
            write(buffer, start, 3)
            for look in looks(buffer) if buffer is watched else ():
                look()
            batch = buffer.sample(5)
            buffer.update_priorities(batch, batch["x"][:, 0])
            drawn.append((batch["key"].tolist(), batch["weight"].tolist(), buffer.draws))
        assert drawn[0] == drawn[1]
    volatile = {"last_write_age": 0.0, "nbytes": 0}
    assert dataclasses.replace(watched.stats(), **volatile) == dataclasses.replace(unwatched.stats(), **volatile)


def test_who_only_looks_is_no_learner_and_no_writer():
    buffer = make()
    for look in looks(buffer):
        look()
    assert (buffer.stats().learners, buffer.stats().writers) == (0, 0)


def test_repr_tells_fill_level_fields_bytes_samplers_limiters_writers_and_the_end():
    buffer = make(1000, sampler=tr.Prioritized(alpha=0.7), limiter=tr.MinSize(5))
    write(buffer, 0, 7)
    text = repr(buffer)
    for part in ("7/1,000 rows", "fields: x, deep/n, deep/wide", "alpha=0.7", "MinSize(min_size=5)", "1 writers"):
        assert part in text
    mib = f"{buffer.nbytes / 2**20:,.1f} MiB shared"
    assert mib in text
    buffer.close()
    assert repr(buffer) == "ReplayBuffer(closed)"


# Its memory


def test_storage_is_the_memory_itself_in_the_shape_of_the_spec():
    buffer = make()
    storage = buffer.storage
    assert {name: tuple(t.shape) for name, t in storage["deep"].items()} == {"n": (10,), "wide": (10, 600)}
    assert (storage["x"].dtype, storage["deep"]["n"].dtype) == (torch.float32, torch.int64)
    assert storage["x"].eq(0).all()
    with Forked(write, buffer, 5, 12) as child:
        assert child.wait() == 0
    # Row k lies in slot k mod capacity; values 5 to 16 were written under the keys 0 to 11.
    assert storage["deep"]["n"].tolist() == [15, 16, *range(7, 15)]
    assert torch.equal(storage["x"], storage["deep"]["n"][:, None].expand(-1, 4).float())
    assert torch.equal(storage["deep"]["wide"][3], torch.full((600,), 8.0, dtype=torch.float64))


def test_what_is_computed_from_storage_is_an_ordinary_tensor():
    buffer = make()
    write(buffer, 0, 10)
    for result in (buffer.storage["x"].mean(), buffer.storage["x"] + 1, buffer.storage["x"].clone()):
        assert type(result) is torch.Tensor
    assert float(buffer.storage["x"].mean()) == 4.5


VIEWS = {
    "a slice": lambda x: x[2:],
    "a row": lambda x: x[1],
    "an iterated row": lambda x: next(iter(x)),
    "a part": lambda x: x.split(2)[1],
    "a part of a nested list": lambda x: torch.atleast_2d([x, x])[1],
    "by keywords": lambda x: torch.narrow(input=x, dim=0, start=2, length=3),
    "columns": lambda x: x.unbind(1)[0],
    "detached": lambda x: x.detach(),
    "its data": lambda x: x.data,
    "transposed": lambda x: x.T,
    "of a shape": lambda x: x.view(2, 5, 4)[1],
    "the dtype it has": lambda x: x.float(),
    "shared": lambda x: x.share_memory_(),
    "a shared slice": lambda x: x[1:].share_memory_(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_no_view_of_storage_can_be_pickled_and_so_turned_into_a_copy(view):
    buffer = make()
    write(buffer, 0, 10)
    seen = view(buffer.storage["x"])
    for pickler in (pickle, ForkingPickler):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickler.dumps(seen)
    write(buffer, 10, 10)
    assert torch.equal(seen, view(torch.arange(10.0, 20.0)[:, None].repeat(1, 4)))


COMPUTED = {
    "compiled": lambda x: torch.compile(lambda t: t * 2 + t[1:].sum(), backend="eager")(x),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "mapped": lambda x: torch.func.vmap(lambda row: row * 2)(x),
    "a gradient": lambda x: torch.func.grad(lambda w: (x * w).sum())(torch.ones(4)),
    "one of several": lambda x: torch.max(x, 0).values,
    "beside nothing": lambda x: torch.nn.functional.multi_head_attention_forward(
        x, x, x, 4, 1, torch.eye(4).repeat(3, 1), None, None, None, False, 0.0, torch.eye(4), None, need_weights=False
    )[0],
    "into another": lambda x: torch.add(x, 1, out=torch.empty(10, 4)),
    "of indices": lambda x: torch.arange(10.0)[x[:, 0].long()],
    "stacked": lambda x: torch.stack([x[0], x[1]]),
    "a number": lambda x: torch.tensor(x.sum().item()),
    "numpy's": lambda x: torch.from_numpy(np.sqrt(x.numpy())),
}


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED.keys())
def test_storage_computes_like_the_tensor_that_it_is(compute):
    buffer = make()
    write(buffer, 0, 10)
    result = compute(buffer.storage["x"])
    assert type(result) is torch.Tensor
    assert torch.equal(result, compute(torch.arange(10.0)[:, None].repeat(1, 4)))


def test_a_deep_copy_of_storage_is_an_ordinary_tensor_of_its_own():
    buffer = make()
    write(buffer, 0, 10)
    copied = copy.deepcopy(buffer.storage)["x"]
    write(buffer, 10, 10)
    assert type(copied) is torch.Tensor
    assert copied[:, 0].tolist() == list(range(10))


def test_histograms_are_those_of_numpy():
    n = 2000
    buffer = make(n, sampler=tr.Prioritized(alpha=1.0, eps=1e-9))
    write(buffer, 0, n + 500)
    keys = torch.arange(500, n + 500)
    errors = 10.0 ** np.random.default_rng(0).uniform(-3, 3, n)
    buffer.update_priorities(keys, errors)
    with torch.device("meta"):  # a default device of the user's
        given = buffer.histograms(bins=16)
    assert {name: tuple(t.shape) for name, t in given.items()} == {
        "priority": (16,),
        "priority_edges": (17,),
        "age": (16,),
        "age_edges": (17,),
    }
    edges = np.geomspace(errors.min(), errors.max(), 17)
    np.testing.assert_allclose(given["priority_edges"], edges, rtol=1e-6)
    assert np.abs(given["priority"].numpy() - np.histogram(np.log10(errors), np.log10(edges))[0]).max() <= 1
    np.testing.assert_allclose(given["age_edges"], np.linspace(0, n - 1, 17))
    assert given["age"].tolist() == np.histogram(np.arange(n), 16)[0].tolist()
    assert int(given["priority"].sum()) == int(given["age"].sum()) == n


@pytest.mark.parametrize("alpha", [0.01, 0.3, 0.6, 1.0, 2.0])
def test_priorities_are_raw_td_errors_wherever_they_are_shown(alpha):
    buffer = make(16, sampler=tr.Prioritized(alpha=alpha, eps=1e-4))
    write(buffer, 0, 4)
    errors = torch.tensor([0.5, 2.0, -8.0, 32.0])
    buffer.update_priorities(torch.arange(4), errors)
    stats, given = buffer.stats(), buffer.histograms(bins=4)
    rel = 1e-6 / min(alpha, 1)  # of a leaf of float32
    assert stats.priority_min == pytest.approx(0.5, rel=rel)
    assert stats.priority_max == pytest.approx(32.0)
    np.testing.assert_allclose(given["priority_edges"][[0, -1]], [0.5, 32.0], rtol=rel)
    assert int(given["priority"].sum()) == 4
    buffer.update_priorities([1], [0.0])
    assert buffer.stats().priority_min == pytest.approx(0.0, abs=1e-4 * rel)
    assert buffer.histograms()["priority_edges"].min() == pytest.approx(1e-4, rel=rel)  # eps: 0 has no logarithm


@pytest.mark.parametrize("sampler", [tr.Uniform(), tr.Prioritized(alpha=0.0)])
def test_where_priorities_do_not_count_each_is_1(sampler):
    buffer = make(16, sampler=sampler)
    assert buffer.stats().priority_min == 0.0
    write(buffer, 0, 4)
    assert buffer.stats().priority_min == 1.0
    assert buffer.histograms(bins=3)["priority"].tolist() == [0, 4, 0]


def test_histograms_of_nothing_and_of_equal_priorities_are_counts_like_others():
    buffer = make()
    assert (int(buffer.histograms()["priority"].sum()), int(buffer.histograms()["age"].sum())) == (0, 0)
    write(buffer, 0, 3)
    given = buffer.histograms(bins=5)
    assert given["priority"].tolist() == [0, 0, 3, 0, 0]
    assert bool((given["priority_edges"].diff() > 0).all())
    with pytest.raises(ValueError, match="bins is 0: expected an int from 1"):
        buffer.histograms(0)


# Its end


def test_a_with_block_closes_the_buffer_also_after_an_error():
    for error in (None, ArithmeticError):
        buffer = make()
        try:
            with buffer as entered:
                assert entered is buffer
                if error:
                    raise error
        except ArithmeticError:
            pass
        with pytest.raises(RuntimeError, match="closed"):
            len(buffer)


def test_closing_one_attached_object_leaves_the_others_their_memory():
    buffer = make()
    other = tr.ReplayBuffer.attach(buffer.handle())
    write(buffer, 0, 4)
    buffer.sample(1)
    buffer.close()
    assert len(other) == 4
    write(other, 4, 4)
    assert other.sample(64)["deep"]["n"].max() == 7
    assert (other.stats().writers, other.stats().learners) == (1, 1)


def test_a_writer_and_a_batch_outlive_the_object_that_made_them():
    buffer = make()
    other = tr.ReplayBuffer.attach(buffer.handle())
    writer = buffer.writer()
    writer.append(x=np.zeros(4), deep={"n": 1, "wide": np.zeros(600)})
    batch = buffer.sample(2)
    del buffer
    writer.append(x=np.zeros(4), deep={"n": 2, "wide": np.zeros(600)})
    other.update_priorities(batch, torch.ones(2))
    assert len(other) == 2


CLOSED = "the replay buffer is closed, and this writer with it: attach it again"


def test_a_writer_of_a_closed_buffer_writes_no_more_and_those_of_other_objects_and_processes_do():
    buffer = make()
    others = tr.ReplayBuffer.attach(buffer.handle())
    writer, block, other = buffer.writer(), buffer.writer(), others.writer()
    row = {"x": np.zeros(4), "deep": {"n": 1, "wide": np.zeros(600)}}
    writer.append(**row)
    with Forked(lambda: buffer.close() or other.append(**row)) as child:
        assert child.wait() == 0
    writer.append(**row)
    buffer.close()
    for call in (lambda: writer.append(**row), lambda: block.extend(**rows(0, 2)), lambda: write(buffer, 0, 1)):
        with pytest.raises(RuntimeError, match="the replay buffer is closed"):
            call()
    with pytest.raises(RuntimeError, match=CLOSED):
        writer.append(**row)
    assert writer.rows == 2
    writer.close()
    block.close()
    assert other.append(**row) == 3
    with Forked(lambda: write(others, 0, 2)) as child:
        assert child.wait() == 0
    assert (len(others), others.stats().rows_written) == (6, 6)


def test_a_writer_of_linked_rows_of_a_closed_buffer_writes_no_more():
    flags = dict.fromkeys(("terminated", "truncated"), tr.Field((), torch.bool))
    buffer = tr.ReplayBuffer({"obs": tr.Field(), "reward": tr.Field(), **flags}, 10, view=tr.Transitions())
    other = tr.ReplayBuffer.attach(buffer.handle())
    with buffer.writer() as writer, buffer.writer(2) as lanes:
        writer.reset(obs=0.0)
        lanes.reset(obs=np.zeros(2))
        buffer.close()
        ended = {"reward": 0.0, "terminated": True, "truncated": False}
        for call in (
            lambda: writer.step(obs=0.0, **ended),
            lambda: writer.reset(obs=0.0),
            lambda: writer.extend(obs=np.zeros(2), **{name: np.array([value]) for name, value in ended.items()}),
            lambda: lanes.step(obs=np.zeros(2), **{name: np.array([value] * 2) for name, value in ended.items()}),
        ):
            with pytest.raises(RuntimeError, match=CLOSED):
                call()
    assert other.stats().rows_written == 3


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_an_iteration_over_a_closed_buffer_hands_out_no_more_batches(prefetch):
    buffer = make()
    write(buffer, 0, 10)
    dataset = tr.ReplayDataset(buffer, 4, prefetch=prefetch)
    mixed = tr.MixedDataset({"own": buffer}, 4, prefetch=prefetch)
    batches, mixtures = iter(dataset), iter(mixed)
    next(batches), next(mixtures)
    buffer.close()
    for iteration in (batches, mixtures, iter(dataset), iter(mixed)):
        with pytest.raises(RuntimeError, match="closed"):
            next(iteration)


def test_an_interrupt_of_a_wait_gets_through_though_another_thread_has_closed_the_buffer(monkeypatch):
    buffer = tr.ReplayBuffer({"obs": tr.Field()}, 10)

    def interrupted(*_):
        buffer.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(waits.Wait, "check_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.sample(1)


def test_a_writer_that_waits_for_room_ends_when_its_buffer_is_closed():
    buffer = make(limiter=tr.SamplesPerInsert(1.0, min_size=1, tolerance=1.0))
    errors, started = [], threading.Event()

    def explore():
        with buffer.writer() as writer:
            started.set()
            try:
                while True:
                    writer.append(x=np.zeros(4), deep={"n": 1, "wide": np.zeros(600)})
            except RuntimeError as error:
                errors.append(str(error))

    explorer = threading.Thread(target=explore)
    explorer.start()
    started.wait()
    eventually(lambda: buffer._segment.census(False)["waiting"])
    buffer.close()
    explorer.join(60)
    assert len(errors) == 1
    assert "the replay buffer is closed" in errors[0]


def within_an_admission(writer):
    with writer.admit():
        writer.append(x=0.0)


@pytest.mark.parametrize(
    ("limiter", "call", "seen"),
    [
        (None, lambda _, writer: writer.append(x=0.0), "waiting"),
        (tr.Admission(batch_size=2, max_age=0), lambda _, writer: within_an_admission(writer), "waiting"),
        (None, lambda queue, _: queue.sample(3), "learners"),
    ],
)
def test_who_waits_or_goes_on_when_a_buffer_is_stopped_and_then_closed_learns_that_it_was_stopped(limiter, call, seen):
    queue = tr.ReplayBuffer({"x": tr.Field()}, 4, sampler=tr.Fifo(), limiter=limiter, name="blue")
    told = []

    def go_on():
        with queue.writer() as writer, queue.expect_writers():
            for _ in range(2):  # the second one is not waiting when it is closed
                try:
                    while True:
                        call(queue, writer)
                except RuntimeError as error:
                    told.append((type(error), str(error)))

    thread = threading.Thread(target=go_on)
    thread.start()
    eventually(lambda: queue._segment.census(False)[seen])
    queue.stop()
    queue.close()
    thread.join(60)
    assert {kind for kind, _ in told} == {tr.Stopped}
    assert all(text.startswith("the replay buffer 'blue' was stopped") for _, text in told)  # and is closed, by then
    with pytest.raises(tr.Stopped, match="'blue' was stopped"):
        queue.extend(x=[0.0])


def test_gather_leaves_out_what_cannot_be_drawn_or_raises_with_the_count_and_the_first_key():
    buffer = make()
    write(buffer, 0, 14)  # keys 0 to 3 are overwritten
    asked = torch.tensor([9, 13, 3, 9, 0, 12])
    assert buffer.gather(asked)["key"].tolist() == buffer.gather(asked, "drop")["key"].tolist() == [9, 13, 9, 12]
    for keys in (asked, asked.numpy(), asked.tolist()):
        with pytest.raises(tr.MissingItems, match="2 of 6 items cannot be drawn, the first under key 3") as caught:
            buffer.gather(keys, missing="raise")
        assert (caught.value.missing, caught.value.asked, caught.value.first) == (2, 6, 3)
    assert isinstance(caught.value, KeyError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    for keys, first in (([0], 0), ([13, 14], 14), ([1, 13], 1), ([4, 4, 0], 0)):
        with pytest.raises(tr.MissingItems, match=f"the first under key {first}:"):
            buffer.gather(torch.tensor(keys), missing="raise")
    for keys in ([13, 4, 4], []):
        assert buffer.gather(keys, missing="raise")["key"].tolist() == keys
    batch = buffer.sample(5)
    assert torch.equal(buffer.gather(batch, missing="raise")["key"], batch["key"])
    with pytest.raises(ValueError, match="missing is 'ignore': expected one of 'drop', 'raise'"):
        buffer.gather(asked, missing="ignore")


def test_an_announcement_of_writers_ends_when_closed_once_or_twice_or_with_its_process():
    buffer = make()

    def supervisors():
        return buffer._segment.census(False)["supervisors"]

    first, second = buffer.expect_writers(), buffer.expect_writers()
    assert supervisors() == 2
    first.close()
    first.close()
    assert supervisors() == 1
    with Forked(buffer.expect_writers) as child:
        assert child.wait() == 0
    with Forked(second.close) as child:  # it is the parent's
        assert child.wait() == 0
    assert supervisors() == 1
    with second:
        pass
    assert supervisors() == 0
    third = buffer.expect_writers()
    buffer.close()
    third.close()
