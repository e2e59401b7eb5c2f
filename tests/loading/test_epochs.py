"""Draws without replacement: every item once before any comes twice, over all learners, iterations and restarts."""

import signal

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from torch.utils.data import DataLoader
from worker_errors import raised_by_worker

import torchreplay as tr

SPEC = {"x": tr.Field((), "int64")}
WITHOUT = tr.Uniform(replacement=False)


def filled(items, capacity=None, **given):
    buffer = tr.ReplayBuffer(SPEC, capacity or items, sampler=WITHOUT, **given)
    buffer.extend(x=np.arange(items))
    return buffer


def count(drawn, batch):
    np.add.at(drawn, batch["x"].numpy(), 1)


def spread(drawn):
    return drawn.max() - drawn.min()


@pytest.mark.parametrize(("items", "size"), [(1, 1), (10, 3), (100, 7), (64, 64), (1000, 256)])
def test_sample_draws_every_item_once_before_any_comes_twice(items, size):
    with filled(items) as buffer:
        drawn = np.zeros(items, int)
        for _ in range(5 * items // size + 1):
            batch = buffer.sample(size)
            assert len(batch["x"].unique()) == size
            assert (batch["weight"] == 1).all()
            torch.testing.assert_close(batch["probability"], torch.full((size,), 1 / items))
            count(drawn, batch)
            assert spread(drawn) <= 1


def test_a_batch_larger_than_the_buffer_has_all_items_as_often_as_each_other_or_once_more():
    with filled(10) as buffer:
        drawn = np.zeros(10, int)
        with pytest.warns(UserWarning, match="holds copies"):
            count(drawn, buffer.sample(32))
        for _ in range(20):
            assert spread(drawn) <= 1
            count(drawn, buffer.sample(32))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_a_loop_over_epochs_ends_and_its_length_is_right(prefetch):
    with filled(100) as buffer:
        dataset = tr.ReplayDataset(buffer, 32, prefetch=prefetch, epochs=3)
        for _ in range(2):
            assert len(dataset) == len(DataLoader(dataset, batch_size=None)) == 12
            drawn, sizes = np.zeros(100, int), []
            for batch in dataset:
                assert len(dataset) == 12
                count(drawn, batch)
                assert spread(drawn) <= 1
                sizes.append(len(batch["x"]))
            assert sizes == [32, 32, 32, 4] * 3
            assert (drawn == 3).all()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("epochs", [None, 1, 3])
def test_what_an_iteration_has_drawn_ahead_when_it_ends_comes_first_in_the_next(prefetch, epochs):
    with filled(100) as buffer:
        drawn = np.zeros(100, int)
        for iteration in range(60):
            for taken, batch in enumerate(tr.ReplayDataset(buffer, 7, prefetch=prefetch, epochs=epochs)):
                count(drawn, batch)
                assert spread(drawn) <= 1
                if taken == iteration % 5:
                    break


def test_an_iteration_begins_with_what_is_left_of_the_epoch_under_way():
    with filled(100) as buffer:
        first = buffer.sample(64)["x"].tolist()
        dataset = tr.ReplayDataset(buffer, 32, epochs=1)
        assert len(dataset) == 2
        rest = [item for batch in dataset for item in batch["x"].tolist()]
        assert sorted(first + rest) == list(range(100))
        assert len(dataset) == 4


def test_items_that_come_are_drawn_in_the_epoch_under_way():
    with filled(50, 1000) as buffer:
        drawn = np.zeros(80, int)
        for batch in tr.ReplayDataset(buffer, 8, epochs=1):
            count(drawn, batch)
            written = len(buffer)
            if written < 80:
                buffer.extend(x=np.arange(written, written + 5))
        assert (drawn == 1).all()


def test_rows_that_are_overwritten_or_discarded_are_not_drawn_and_the_others_are():
    with filled(64) as buffer:
        keys = buffer.keys()
        buffer.sample(16)
        buffer.extend(x=np.arange(64, 84))
        buffer.discard(keys[60:])
        drawn = np.zeros(84, int)
        for batch in tr.ReplayDataset(buffer, 16, epochs=1):
            count(drawn, batch)
        for batch in tr.ReplayDataset(buffer, 16, epochs=2):
            count(drawn, batch)
        assert (drawn[:20] == 0).all()
        assert (drawn[60:64] == 0).all()
        assert set(drawn[20:60]) == {2, 3}
        assert (drawn[64:] == 3).all()


def test_items_of_a_view_are_drawn_once_in_an_epoch():
    flag, steps = tr.Field((), "bool"), 15
    spec = {"obs": tr.Field((2,)), "reward": tr.Field(), "terminated": flag, "truncated": flag}
    with tr.ReplayBuffer(spec, 200, view=tr.Transitions(n_step=3), sampler=WITHOUT) as buffer:
        ends = np.arange(steps) == steps - 1
        for _ in range(8):
            buffer.extend(
                obs=np.zeros((steps + 1, 2)), reward=np.zeros(steps), terminated=ends, truncated=np.zeros(steps, bool)
            )
        keys = torch.cat([batch["key"] for batch in tr.ReplayDataset(buffer, 7, epochs=1)])
        assert len(keys) == len(keys.unique()) == buffer.num_items > 100


def draw_some(buffer, drawn):
    for _ in range(100):
        for item in buffer.sample(8)["x"].tolist():
            drawn[item] += 1


def test_learners_in_several_processes_share_the_epochs():
    with filled(1500) as buffer:
        counts = [shared_counters(1500) for _ in range(3)]
        learners = [Forked(draw_some, buffer, drawn) for drawn in counts]
        for learner in learners:
            assert learner.wait() == 0
        times = np.sum([drawn[:] for drawn in counts], axis=0)
        assert np.bincount(times).tolist() == [0, 600, 900]


def draw_for_ever(buffer, drawn, batches):
    for batch in tr.ReplayDataset(buffer, 8, prefetch=2):
        for item in batch["x"].tolist():
            drawn[item] += 1
        batches[0] += 1


@pytest.mark.slow
def test_a_learner_that_is_killed_costs_at_most_the_batches_it_had_and_the_others_go_on():
    items = 997
    with filled(items) as buffer:
        for kill in range(10):
            drawn, batches = shared_counters(items), shared_counters(1)
            with Forked(draw_for_ever, buffer, drawn, batches) as learner:
                eventually(lambda done=batches, until=20 + 7 * kill: done[0] > until)
                learner.kill()
                assert learner.status == -signal.SIGKILL
            for batch in tr.ReplayDataset(buffer, 8, epochs=1):  # what it left
                for item in batch["x"].tolist():
                    drawn[item] += 1
            got = np.asarray(drawn[:])
            assert got.max() * items - got.sum() <= 5 * 8
            whole = np.zeros(items, int)
            for batch in tr.ReplayDataset(buffer, 8, epochs=2):
                count(whole, batch)
            assert (whole == 2).all()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("taken", range(1, 13))
def test_a_resumed_iteration_goes_on_with_the_same_batches(tmp_path, prefetch, taken):
    with filled(100, seed=3) as buffer:
        dataset = tr.ReplayDataset(buffer, 32, prefetch=prefetch, epochs=3)
        batches = iter(dataset)
        for _ in range(taken):
            next(batches)
        state = dataset.state_dict()
        buffer.save(tmp_path / "checkpoint")
        rest = [batch["x"].tolist() for batch in batches]
    with tr.ReplayBuffer.load(tmp_path / "checkpoint") as buffer:
        resumed = tr.ReplayDataset(buffer, 32, prefetch=prefetch, epochs=3)
        resumed.load_state_dict(state)
        assert len(resumed) == 12
        assert [batch["x"].tolist() for batch in resumed] == rest
        assert len(rest) == 12 - taken


def test_a_buffer_in_a_file_goes_on_with_its_epoch(tmp_path):
    with filled(100, path=tmp_path / "buffer") as buffer:
        first = buffer.sample(64)["x"].tolist()
    with tr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        assert buffer.sampler == WITHOUT
        rest = [item for batch in tr.ReplayDataset(buffer, 32, epochs=1) for item in batch["x"].tolist()]
    assert sorted(first + rest) == list(range(100))


@pytest.mark.parametrize("sampler", [tr.Uniform(), tr.Prioritized()])
def test_a_checkpoint_of_an_epoch_under_way_is_loaded_with_other_samplers_and_the_other_way_round(tmp_path, sampler):
    with filled(100) as buffer:
        buffer.sample(64)
        buffer.save(tmp_path / "without")
    with tr.ReplayBuffer.load(tmp_path / "without", sampler=sampler) as buffer:
        torch.testing.assert_close(buffer.gather(buffer.keys())["probability"], torch.full((100,), 0.01))
        buffer.save(tmp_path / "with")
    with tr.ReplayBuffer.load(tmp_path / "with", sampler=WITHOUT) as buffer:
        assert sum(len(batch["x"]) for batch in tr.ReplayDataset(buffer, 32, epochs=1)) == 100


def test_a_child_that_is_forked_in_an_iteration_takes_part_in_the_epoch():
    with filled(100) as buffer:
        drawn = shared_counters(100)

        def draw():
            for batch in tr.ReplayDataset(buffer, 8, epochs=1):
                for item in batch["x"].tolist():
                    drawn[item] += 1

        batches = iter(tr.ReplayDataset(buffer, 8, epochs=1))
        for item in next(batches)["x"].tolist():
            drawn[item] += 1
        with Forked(draw) as child:
            assert child.wait() == 0
        for batch in batches:
            for item in batch["x"].tolist():
                drawn[item] += 1
        assert np.asarray(drawn[:]).tolist() == [1] * 100


def test_the_statistics_show_the_items_that_can_be_drawn_whatever_the_epoch_has_drawn():
    with filled(100) as buffer:
        for _ in range(5):
            buffer.sample(30)
            assert buffer.num_items == 100
            assert buffer.stats().priority_min == 1.0
            assert (buffer.priorities(buffer.keys()) == 1).all()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"epochs": 0}, "at least 1"),
        ({"epochs": True}, "epochs is True"),
        ({"epochs": "2"}, "epochs is '2'"),
        ({"epochs": 2, "steps": 3}, "one of the two"),
        ({"epochs": 2, "device": "cpu", "pin": "staging"}, "pin"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given, text):
    with filled(10) as buffer, pytest.raises(ValueError, match=text):
        tr.ReplayDataset(buffer, 4, **given)


def test_epochs_are_refused_where_draws_are_with_replacement():
    for sampler in (tr.Uniform(), tr.Prioritized()):
        with tr.ReplayBuffer(SPEC, 10, sampler=sampler) as buffer, pytest.raises(ValueError, match="replacement=False"):
            tr.ReplayDataset(buffer, 4, epochs=1)


@pytest.mark.parametrize("replacement", [0, 1, None, "no", np.bool_(False)])
def test_replacement_is_a_bool(replacement):
    with pytest.raises(ValueError, match="expected True or False"):
        tr.Uniform(replacement=replacement)


def test_a_buffer_too_large_for_epochs_is_refused():
    with pytest.raises(ValueError, match="at most 1,073,741,824"):
        tr.footprint(SPEC, (1 << 30) + 1, sampler=WITHOUT)


def test_workers_of_a_loader_refuse_epochs():
    with filled(10) as buffer:
        loader = DataLoader(tr.ReplayDataset(buffer, 4, epochs=1), batch_size=None, num_workers=1)
        with raised_by_worker("num_workers at 0"):
            next(iter(loader))


def test_a_state_of_another_kind_of_dataset_is_refused():
    with filled(10) as buffer:
        of_epochs, endless = tr.ReplayDataset(buffer, 4, epochs=1), tr.ReplayDataset(buffer, 4)
        with pytest.raises(ValueError, match="epochs_left"):
            of_epochs.load_state_dict(endless.state_dict())
        with pytest.raises(ValueError, match="epochs_left"):
            endless.load_state_dict(of_epochs.state_dict())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_ratio_that_admits_the_rest_of_an_epoch_does_not_wait_for_a_whole_batch(prefetch):
    limiter = tr.SamplesPerInsert(1.0, min_size=100, tolerance=1.0)
    with filled(100, 1000, limiter=limiter) as buffer:
        sizes = [len(batch["x"]) for batch in tr.ReplayDataset(buffer, 32, prefetch=prefetch, epochs=1, timeout=20)]
        assert sizes == [32, 32, 32, 4]
        assert buffer.stats().sampled == 100


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_whose_buffer_is_emptied_ends(prefetch):
    with filled(100) as buffer:
        taken = 0
        for _ in tr.ReplayDataset(buffer, 32, prefetch=prefetch, epochs=1, timeout=20):
            taken += 1
            if taken == 4:
                buffer.clear()
        assert taken == 4


@pytest.mark.parametrize("prefetch", [0, 2, 5])
def test_no_item_comes_twice_in_a_loop_of_one_epoch_whatever_comes_meanwhile(prefetch):
    def write(buffer):
        index = 300
        while not buffer.stopped:
            buffer.extend(x=np.arange(index, index + 5))
            index += 5

    with filled(300, 512) as buffer, Forked(write, buffer) as writer:
        for _ in range(60):
            items = [
                item
                for batch in tr.ReplayDataset(buffer, 32, prefetch=prefetch, epochs=1)
                for item in batch["x"].tolist()
            ]
            assert len(items) == len(set(items))
        buffer.stop()
        assert writer.wait() == 0


def test_what_was_drawn_ahead_and_is_left_out_of_a_resumed_run_is_due(tmp_path):
    with filled(100) as buffer:
        dataset = tr.ReplayDataset(buffer, 20, prefetch=2, epochs=1)
        batches = iter(dataset)
        first = next(batches)["x"].tolist()
        state = dataset.state_dict()
        assert [len(batch["key"]) for batch in state["drawn"]] == [20, 20]
        buffer.save(tmp_path / "checkpoint")
        batches.close()
    with tr.ReplayBuffer.load(tmp_path / "checkpoint") as buffer:
        dataset = tr.ReplayDataset(buffer, 10, epochs=1)
        dataset.load_state_dict(state)
        rest = [item for batch in dataset for item in batch["x"].tolist()]
        assert sorted(first + rest) == list(range(100))


@pytest.mark.parametrize("taken", [0, 1, 9, 10])
@pytest.mark.parametrize("own", [True, False])
def test_a_state_that_is_loaded_over_the_buffer_it_is_of_makes_no_item_come_twice_in_an_epoch(taken, own):
    with filled(40) as buffer:
        dataset = tr.ReplayDataset(buffer, 4, prefetch=2, epochs=1)
        batches = iter(dataset)
        came = [number for _ in range(taken) for number in next(batches)["x"].tolist()]
        state = dataset.state_dict()
        batches.close()
        again = dataset if own else tr.ReplayDataset(buffer, 4, epochs=1)
        again.load_state_dict(state)
        came += [number for batch in again for number in batch["x"].tolist()]
        assert sorted(came) == list(range(40))
