"""Groups of a queue: each comes whole, in one batch of one process; a death, a straggler or a full ring loses none."""

import logging
import os
import pickle
import random
import signal
import time
from collections import defaultdict
from contextlib import ExitStack

import pytest
import torch
from forked import Forked, eventually, shared_counters
from torch.utils.data import DataLoader

import torchreplay as tr

SPEC = {
    "prompt": tr.Field((), torch.int64),
    "x": tr.Field((), torch.int64),
    "info": {"seed": tr.Field((), torch.int64)},
}

COARSE = 0.01
"""Seconds by which the clock of arrivals may be behind."""


@pytest.fixture(autouse=True)
def _quick_ends(monkeypatch):
    for module in ("segment.waits", "buffer.jams"):
        monkeypatch.setattr(f"torchreplay.{module}.RETURN_GRACE", 0.3)


def queue(prompts=(), capacity=200, path=None, **fifo):
    buffer = tr.ReplayBuffer(SPEC, capacity, sampler=tr.Fifo(**fifo), path=path)
    write(buffer, prompts)
    return buffer


def write(buffer, prompts, first=0, writer=None):
    with writer or buffer.writer() as rows:
        for number, prompt in enumerate(prompts, first):
            rows.append(prompt=prompt, x=number, info={"seed": -number})


def groups_of(batch):
    """The members of each group of a batch, by their numbers, with its prompt."""
    groups = defaultdict(list)
    for group, prompt, x in zip(batch["group"].tolist(), batch["prompt"].tolist(), batch["x"].tolist(), strict=True):
        groups[group, prompt].append(x)
    assert [group for group, _ in groups] == list(range(len(groups))), "groups are not one after the other"
    assert torch.equal(batch["info"]["seed"], -batch["x"])
    return [(prompt, members) for (_, prompt), members in groups.items()]


class Model:
    """Lists of members by prompt: what comes next, and what waits."""

    def __init__(self, size):
        self.size, self.waiting, self.whole = size, defaultdict(list), []

    def add(self, number, prompt):
        members = self.waiting[prompt]
        members.append(number)
        if len(members) == self.size:
            self.whole.append((prompt, self.waiting.pop(prompt)))


def held(buffer):
    return buffer.stats().held_items


# What a batch is


def test_rollouts_of_any_length_are_grouped_by_their_prompt_wherever_that_stands_in_the_spec():
    spec = {"tokens": tr.Ragged(torch.int32), "policy_version": tr.Field((), torch.int64)}
    spec |= {"prompt": tr.Field((), torch.int64), "reward": tr.Field()}
    order = [0, 1, 1, 2, 0, 2, 3, 0, 1, 3]
    with tr.ReplayBuffer(spec, 100, ragged_bytes=1 << 16, sampler=tr.Fifo()) as buffer:
        with buffer.writer() as writer:
            for number, prompt in enumerate(order):
                writer.policy_version = number % 3  # by which nothing is grouped
                writer.append(tokens=[prompt] * number, prompt=prompt, reward=number)
        dataset = tr.GroupDataset(buffer, by="prompt", size=2, groups=2, min_size=1)
        batches = iter(dataset)
        given = []
        for _ in range(2):
            batch = next(batches)
            values = batch["tokens"].split(batch.lengths("tokens").tolist())
            for prompt, number, tokens in zip(batch["prompt"].tolist(), batch["reward"].tolist(), values, strict=True):
                assert tokens.tolist() == [prompt] * int(number)
                given.append((prompt, int(number)))
    assert given == [(1, 1), (1, 2), (0, 0), (0, 4), (2, 3), (2, 5), (3, 6), (3, 9)]


@pytest.mark.parametrize("seed", range(8))
def test_groups_come_whole_in_the_order_in_which_they_became_so(seed):
    rng = random.Random(seed)
    size, many = rng.choice([(1, 3), (3, 2), (4, 4), (8, 1)])
    model, got, number = Model(size), [], 0
    with queue(capacity=1000) as buffer:
        batches = iter(tr.GroupDataset(buffer, "prompt", size, many))
        lease = buffer.expect_writers()
        while len(got) < 30:
            while len(model.whole) - len(got) < many:
                prompt = rng.randrange(7) - 3
                write(buffer, [prompt], number)
                model.add(number, prompt)
                number += 1
            got += groups_of(next(batches))
            assert held(buffer) == size * many
        lease.close()
        assert got == model.whole[: len(got)]
        got += [group for batch in batches for group in groups_of(batch)]
        assert got == model.whole
        assert (held(buffer), buffer.num_items) == (0, sum(map(len, model.waiting.values())))


def test_members_beyond_the_size_begin_the_next_group_of_the_same_prompt():
    with queue([5] * 7 + [6] * 3) as buffer:
        dataset = tr.GroupDataset(buffer, "prompt", 3, 2)
        assert [groups_of(batch) for batch in dataset] == [[(5, [0, 1, 2]), (5, [3, 4, 5])], [(6, [7, 8, 9])]]
        assert values(buffer.sample(1)) == [6]
        assert (dataset.counts.given, dataset.counts.incomplete) == (3, 0)


def values(batch):
    return batch["x"].tolist()


def test_groups_are_of_a_nested_field_too_and_come_as_often_as_max_draws_says():
    with queue([1, 2], max_draws=2) as buffer:
        batches = tr.GroupDataset(buffer, "info/seed", 1, 1)
        assert [values(batch) for batch in batches] == [[0], [0], [1], [1]]


def test_a_straggler_keeps_no_other_group_from_coming_however_often_the_ring_turns():
    prompts = [-1, *(prompt for prompt in range(60) for _ in range(4)), -1]
    with queue(capacity=16) as buffer, Forked(write, buffer, prompts):
        got = [group for batch in tr.GroupDataset(buffer, "prompt", 4, 2, min_size=2) for group in groups_of(batch)]
    assert [prompt for prompt, _ in got] == [*range(60), -1]
    assert got[-1] == (-1, [0, 241])


def test_a_group_of_which_a_member_was_overwritten_lacks_it():
    with queue([1, 2, 2, 1, 2, 2], capacity=5, when_full="drop_oldest") as buffer:
        assert [groups_of(batch) for batch in tr.GroupDataset(buffer, "prompt", 2, 1)] == [[(2, [1, 2])], [(2, [4, 5])]]
        assert values(buffer.sample(1)) == [3]


def test_a_dataset_has_as_many_batches_as_steps_says_and_goes_on_from_its_state():
    with queue([prompt // 2 for prompt in range(40)], commit="manual") as buffer:
        dataset = tr.GroupDataset(buffer, "prompt", 2, 2, steps=3)
        assert len(dataset) == 3
        assert [len(batch["x"]) for batch in dataset] == [4, 4, 4]
        state = dataset.state_dict()
        assert state["held"]["key"].tolist() == list(range(12))
        other = pickle.loads(pickle.dumps(dataset))
        assert repr(other) == repr(dataset)
        assert values(next(iter(DataLoader(dataset, batch_size=None)))) == [12, 13, 14, 15]


# Groups that are late


@pytest.mark.parametrize("least", [None, 1, 2, 3])
def test_a_late_group_is_given_with_enough_members_and_else_dropped_and_counted(least):
    prompts = [1, 1, 1, 1, 2, 2, 3]
    with queue(prompts) as buffer:
        dataset = tr.GroupDataset(buffer, "prompt", 3, 1, least, timeout=0)
        got = [group for batch in dataset for group in groups_of(batch)]
        late = [(1, [3]), (2, [4, 5]), (3, [6])]
        enough = [group for group in late if least is not None and len(group[1]) >= least]
        assert got == [(1, [0, 1, 2]), *enough]
        counts = dataset.counts
        assert (counts.given, counts.incomplete) == (len(got), len(enough))
        assert (counts.dropped, counts.dropped_items) == (3 - len(enough), 7 - sum(len(x) for _, x in got))
        assert (buffer.num_items, held(buffer)) == (0, 0)


def test_a_group_is_not_late_before_its_time_and_then_it_is_though_no_row_comes():
    with queue() as buffer, buffer.expect_writers():
        began = time.monotonic()
        write(buffer, [1, 2, 2, 1, 1])
        patient = tr.GroupDataset(buffer, "prompt", 3, 1, 2, timeout=60)
        assert groups_of(next(iter(patient))) == [(1, [0, 3, 4])]
        hasty = tr.GroupDataset(buffer, "prompt", 3, 1, 2, timeout=0.2)
        assert groups_of(next(iter(hasty))) == [(2, [1, 2])]
        assert time.monotonic() - began >= 0.2 - 2 * COARSE
        assert (patient.counts.incomplete, hasty.counts.incomplete) == (0, 1)


def test_what_is_dropped_makes_room_and_never_comes_again():
    with queue(capacity=8) as buffer, buffer.expect_writers():
        dataset = tr.GroupDataset(buffer, "prompt", 2, 1, timeout=0)
        batches = iter(dataset)
        for turn in range(5):
            write(buffer, [1, 2, 3, 4, 50, 50], 6 * turn)  # waits for ever where there is no room
            assert groups_of(next(batches)) == [(50, [6 * turn + 4, 6 * turn + 5])]
        assert (dataset.counts.given, dataset.counts.dropped, dataset.counts.dropped_items) == (5, 20, 20)
    with queue([1, 2], max_draws=3) as buffer:
        assert list(tr.GroupDataset(buffer, "prompt", 2, 1, timeout=0)) == []
        assert buffer.num_items == 0


# Ends


def test_at_the_end_of_all_writers_unfinished_groups_come_with_enough_members_and_the_others_are_named(caplog):
    prompts = [1, 1, 1, 2, 2, 3, 4, 4, 4, 4]
    for least, last in ((None, []), (2, [(2, [3, 4])])):
        with queue(prompts) as buffer, caplog.at_level(logging.WARNING, "torchreplay"):
            caplog.clear()
            dataset = tr.GroupDataset(buffer, "prompt", 3, 2, least)
            got = [groups_of(batch) for batch in dataset]
            assert got[0] == [(1, [0, 1, 2]), (4, [6, 7, 8])]
            assert got[1:] == [last] * bool(last)
            left = "3 groups have fewer than 3 members (2 has 2, 3 has 1, 4 has 1): these 4 items"
            named = "2 groups have fewer than 3 members (3 has 1, 4 has 1): these 2 items"
            assert (named if last else left) in caplog.text
            assert buffer.num_items == (2 if last else 4)


def test_a_single_group_of_a_single_item_is_named_as_one(caplog):
    with queue([5]) as buffer, caplog.at_level(logging.WARNING, "torchreplay"):
        assert not list(tr.GroupDataset(buffer, "prompt", 2, 1))
        assert "1 group has fewer than 2 members (5 has 1): this item stays in it, and is not given" in caplog.text


def test_the_group_of_a_killed_writer_comes_when_it_is_late():
    with queue() as buffer, buffer.expect_writers():
        done = shared_counters(1)

        def generate():
            writer = buffer.writer()
            for number in range(2):
                writer.append(prompt=9, x=number, info={"seed": -number})
            done[0] = 1
            signal.pause()

        with Forked(generate) as victim:
            eventually(lambda: done[0])
            victim.kill()
        write(buffer, [8, 8, 8], 2)
        batches = iter(tr.GroupDataset(buffer, "prompt", 3, 1, 2, timeout=0.2))
        assert sorted(groups_of(next(batches))[0] for _ in range(2)) == [(8, [2, 3, 4]), (9, [0, 1])]


def test_unfinished_groups_that_fill_the_ring_are_found_and_named():
    with queue(capacity=8) as buffer, Forked(write, buffer, [0, 0, 0, *range(1, 20)]):
        with pytest.raises(
            tr.WouldBlockForever, match=r"queue is full.* 6 groups have fewer than 4 members \(0 has 3, "
        ):
            next(iter(tr.GroupDataset(buffer, "prompt", 4, 2)))
        dataset = tr.GroupDataset(buffer, "prompt", 4, 1, 3, timeout=0.1)
        assert groups_of(next(iter(dataset))) == [(0, [0, 1, 2])]


def test_a_batch_that_is_held_by_hand_and_fills_the_ring_with_unfinished_groups_is_named():
    prompts = [0, 0, 1, 1, 2, 3, 4, 5, 6]
    with queue(capacity=8, commit="manual") as buffer, Forked(write, buffer, prompts):
        batches = iter(tr.GroupDataset(buffer, "prompt", 2, 2))
        assert len(next(batches)["x"]) == 4
        with pytest.raises(tr.WouldBlockForever, match=r"holds 4 of the 8 rows.*4 groups have.*call commit\(\) first"):
            next(batches)


# Deaths, and several learners


def test_a_killed_learner_loses_no_group_and_a_commit_is_of_what_was_given(tmp_path):
    prompts = [prompt % 5 for prompt in range(20)]
    model = Model(4)
    for number, prompt in enumerate(prompts):
        model.add(number, prompt)
    with queue(prompts, path=tmp_path / "queue", commit="manual") as buffer, buffer.expect_writers():
        got = shared_counters(2)

        def learn():
            for batch in tr.GroupDataset(buffer, "prompt", 4, 1):
                got[0] += 1
                if got[0] == 2:
                    got[1] = buffer.commit()
                elif got[0] == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                assert len(groups_of(batch)) == 1

        with Forked(learn) as learner:
            assert learner.wait() == -signal.SIGKILL
        assert (got[0], got[1]) == (4, 8)
    with tr.ReplayBuffer.open(tmp_path / "queue") as buffer:
        again = [group for batch in tr.GroupDataset(buffer, "prompt", 4, 2) for group in groups_of(batch)]
        assert again == model.whole[2:]


def test_a_resumed_learner_gets_the_groups_that_its_saved_model_has_not_seen(tmp_path):
    prompts = [prompt % 5 for prompt in range(40)]
    with queue(prompts, path=tmp_path / "queue", commit="manual") as buffer:
        dataset = tr.GroupDataset(buffer, "prompt", 4, 2)
        batches = iter(dataset)
        seen = groups_of(next(batches))
        state = dataset.state_dict()  # the model is saved here, and nothing committed
        next(batches)
        batches.close()
    with tr.ReplayBuffer.open(tmp_path / "queue") as buffer:
        dataset = tr.GroupDataset(buffer, "prompt", 4, 2)
        dataset.load_state_dict(state)
        seen += [group for batch in dataset for group in groups_of(batch)]
        model = Model(4)
        for number, prompt in enumerate(prompts):
            model.add(number, prompt)
        assert seen == model.whole


def test_ranks_that_wait_for_each_other_all_get_their_batches():
    """As in a step of DDP, whose writers wait for the next weights: there is just one batch for each rank."""
    size, many, ranks = 4, 3, 2
    prompts = [number % (many * ranks) for number in range(size * many * ranks)]
    with queue() as buffer, buffer.expect_writers():
        arrived, came = shared_counters(ranks), shared_counters(len(prompts))

        def learn(rank):
            batches = iter(tr.GroupDataset(buffer, "prompt", size, many))
            for _, members in groups_of(next(batches)):
                for number in members:
                    came[number] += 1 + rank
            arrived[rank] = 1
            eventually(lambda: sum(arrived[:]) == ranks)  # the all-reduce

        with Forked(learn, 0) as first, Forked(learn, 1) as second:
            write(buffer, prompts)
            assert (first.wait(), second.wait()) == (0, 0)
        by_prompt = [tuple(came[prompt :: many * ranks]) for prompt in range(many * ranks)]
        assert sorted(by_prompt) == [(1,) * size] * many + [(2,) * size] * many


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_deaths_of_learners_and_writers_lose_and_split_no_group(seed):
    rng, size, prompts, generators = random.Random(seed), 3, 60, 2
    with queue(capacity=400) as buffer:  # one generator may be far ahead of the other
        came, written = shared_counters(size * prompts), shared_counters(generators)

        def generate(index):
            """Writes every other member. A life goes on where the one before has noted what it wrote."""
            with buffer.writer() as writer:
                for number in range(generators * written[index] + index, size * prompts, generators):
                    writer.append(prompt=number // size, x=number, info={"seed": -number})
                    written[index] += 1

        def learn(least=None):
            for batch in tr.GroupDataset(buffer, "prompt", size, 2, least):
                for prompt, members in groups_of(batch):
                    assert len(members) == size or least
                    for number in members:
                        assert number // size == prompt
                        came[number] += 1

        lives = [(generate, 0), (generate, 1), (learn,), (learn,)]
        with buffer.expect_writers(), ExitStack() as stack:
            running = [stack.enter_context(Forked(*life)) for life in lives]

            def seen(n):
                return sum(came[:]) >= n or not any(generator.is_running() for generator in running[:2])

            for _ in range(20):
                victim, more = rng.randrange(4), sum(came[:]) + rng.randrange(8)
                eventually(lambda more=more: seen(more))
                running[victim].kill()
                running[victim] = stack.enter_context(Forked(*lives[victim]))
            assert [generator.wait() for generator in running[:2]] == [0, 0]
        # Who died before it had noted a row wrote it twice: then a prompt has members of a second group.
        learn(1)
        assert all(came)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "promt"}, r"by is 'promt', which is no field of the queue: expected one of 'prompt', 'x', 'info/seed'"),
        ({"by": 3}, "by is 3, which is no field"),
        ({"by": "text"}, "by is 'text'.*expected a scalar of dtype int64"),
        ({"by": "pair"}, "by is 'pair'.*expected a scalar of dtype int64"),
        ({"size": 0}, "size is 0"),
        ({"size": True}, "size is True"),
        ({"size": 1.5}, r"size is 1\.5"),
        ({"groups": 0}, "groups is 0"),
        ({"groups": "8"}, "groups is '8'"),
        ({"min_size": 5}, "min_size is 5"),
        ({"min_size": 0}, "min_size is 0"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": True}, "timeout is True"),
        ({"groups": 30}, "a batch has 120 items, and the queue holds 100 rows"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    spec = SPEC | {"text": tr.Field((), torch.int32), "pair": tr.Field(2, torch.int64)}
    with tr.ReplayBuffer(spec, 100, sampler=tr.Fifo()) as buffer, pytest.raises((TypeError, ValueError), match=message):
        tr.GroupDataset(buffer, **{"size": 4, "groups": 2, **arguments})


def test_what_holds_no_groups_is_refused():
    flag = tr.Field((), torch.bool)
    steps = {"prompt": tr.Field((), torch.int64), "obs": tr.Field(), "terminated": flag, "truncated": flag}
    with (
        tr.ReplayBuffer(SPEC, 100) as replay,
        tr.ReplayBuffer(steps, 100, sampler=tr.Fifo(), view=tr.Sequences(2)) as sequences,
        tr.ReplayBuffer({"group": SPEC["x"]}, 100, sampler=tr.Fifo()) as named,
        queue([1, 1]) as buffer,
    ):
        for wrong, by, message in (
            (replay, "prompt", "needs a queue; expected a buffer with sampler=tr.Fifo"),
            (sequences, "prompt", "whose items have several rows"),
            (named, "group", "the queue has a field 'group'"),
            ([buffer], "prompt", r"expected a ReplayBuffer with sampler=tr\.Fifo"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                tr.GroupDataset(wrong, by, 2, 1)
        dataset = tr.GroupDataset(buffer, "prompt", 2, 1)
        with pytest.raises(TypeError, match="iterate it itself"):
            tr.QueueLoader(dataset)
        with pytest.raises(RuntimeError, match="leave num_workers at 0"):
            next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
        assert groups_of(next(iter(dataset))) == [(1, [0, 1])]
