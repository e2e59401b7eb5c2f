"""`rewrite`, `rows_of`, `discard` and `discard_episode`: rows that are there get other values, or are drawn no more."""

import itertools
import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest
import torch
from late_copies import StagedDataset
from scalar_steps import STEPS

import torchreplay as tr
from torchreplay.checkpoint import buffer_checkpoint

SPEC = {"x": tr.Field((3,)), "nest": {"a": tr.Field((), torch.int64), "b": tr.Field((), torch.uint8)}}


def filled(n=10, **options):
    buffer = tr.ReplayBuffer(SPEC, 10, seed=3, **options)
    buffer.extend(x=np.zeros((n, 3)), nest={"a": np.arange(n), "b": np.zeros(n, np.uint8)})
    return buffer


def stepped(view, capacity=40, **options):
    """Two episodes of five and four steps, the first one ended; rewards are 1, 2, 3, ..."""
    buffer = tr.ReplayBuffer(STEPS, capacity, view=view, seed=3, **options)
    writer, reward, keys = buffer.writer(), 0.0, []
    for steps, ended in ((5, True), (4, False)):
        keys.append([int(writer.reset(obs=0))])
        for i in range(1, steps + 1):
            reward += 1
            done = ended and i == steps
            keys[-1].append(int(writer.step(obs=i, action=i, reward=reward, terminated=done, truncated=False)))
    return buffer, keys


def test_rows_get_the_values_given_and_keep_all_others():
    buffer = filled()
    assert buffer.rewrite([7, 2], x=torch.tensor([[1.0, 2, 3], [4, 5, 6]]), nest={"b": [200, 100]}) == 2
    batch = buffer.gather(buffer.keys())
    expected = torch.zeros(10, 3)
    expected[7], expected[2] = torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5, 6])
    assert torch.equal(batch["x"], expected)
    assert batch["nest"]["a"].tolist() == list(range(10))
    assert batch["nest"]["b"].tolist() == [0, 0, 100, 0, 0, 0, 0, 200, 0, 0]


def test_rows_that_are_gone_are_counted_out_and_of_equal_keys_the_last_wins():
    buffer = filled()
    buffer.extend(x=np.zeros((2, 3)), nest={"a": [10, 11], "b": [0, 0]})
    assert buffer.rewrite([0, 5, 1, 5], nest={"a": [70, 71, 72, 73]}) == 1
    assert buffer.gather([5, 10, 11])["nest"]["a"].tolist() == [73, 10, 11]


def test_values_are_cast_by_the_rule_of_writes():
    buffer = filled()
    assert buffer.rewrite(np.array([1], np.int32), x=np.ones((1, 3), np.float16)) == 1
    assert buffer.gather([1])["x"].tolist() == [[1, 1, 1]]
    assert buffer.rewrite([], x=np.zeros((0, 3))) == 0


@pytest.mark.parametrize(
    ("keys", "fields", "error"),
    [
        ([1], {}, r"rewrite\(\) got no field: give values by the field's name"),
        ([1], {"y": [1]}, r"unknown field 'y': expected some of 'x', 'nest'; nothing was changed"),
        ([1], {"nest": {"c": [1]}}, r"unknown field 'nest/c': expected some of 'nest/a', 'nest/b'"),
        ([1], {"nest": [1]}, r"field 'nest' is nested: expected a dict, got"),
        ([1], {"x": np.zeros((1, 4))}, r"field 'x': got .*, expected float32 of shape \(n, 3\)"),
        ([1, 2], {"x": np.zeros((3, 3))}, r"field 'x': got 3 values, expected one for each of the 2 keys"),
        ([1], {"nest": {"a": [1.5]}}, r"field 'nest/a': .* does not cast to int64"),
        ([1], {"nest": {"b": [300]}}, r"field 'nest/b': got 300, which uint8 does not hold"),
        ([1, 10], {"nest": {"a": [5, 5]}}, r"key 10 at index 1 was never issued by this buffer: expected 0 to 9"),
        ([-1], {"nest": {"a": [5]}}, r"key -1 at index 0 was never issued"),
        ([1.5], {"nest": {"a": [5]}}, r"the keys are .*, expected int64 of shape \(n,\)"),
        ("xy", {"nest": {"a": [5]}}, r"the keys are .*, expected int64"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(keys, fields, error):
    buffer = filled()
    before = buffer.gather(buffer.keys())
    with pytest.raises(ValueError, match=error):
        buffer.rewrite(keys, **fields)
    after = buffer.gather(buffer.keys())
    assert torch.equal(before["x"], after["x"])
    assert torch.equal(before["nest"]["a"], after["nest"]["a"])


def test_a_batch_names_its_rows_unless_items_have_several():
    buffer = filled()
    batch = buffer.gather([3, 4])
    assert buffer.rewrite(batch, nest={"a": [30, 40]}) == 2
    assert buffer.gather([3, 4])["nest"]["a"].tolist() == [30, 40]
    with filled() as other, pytest.raises(ValueError, match="drawn from another buffer"):
        other.rewrite(batch, nest={"a": [30, 40]})
    linked, _ = stepped(tr.Transitions())
    with pytest.raises(ValueError, match=r"items have several rows under Transitions: give keys of rows"):
        linked.rewrite(linked.gather(linked.keys()), reward=np.zeros(9))


@pytest.mark.parametrize("field", ["terminated", "truncated"])
@pytest.mark.parametrize("view", [tr.Transitions(), tr.Sequences(2)])
def test_where_episodes_end_is_not_rewritten(view, field):
    buffer, keys = stepped(view)
    with pytest.raises(ValueError, match=f"field '{field}' says where episodes end.*discard_episode"):
        buffer.rewrite(keys[0][:1], **{field: [True]})


@pytest.mark.parametrize("view", [tr.Transitions(), tr.Sequences(3)], ids=repr)
def test_a_row_that_begins_an_episode_has_no_step_to_rewrite(view):
    buffer, (first, second) = stepped(view)
    with pytest.raises(ValueError, match=rf"key {second[0]} at index 1 begins an episode.*rows_of\(keys\)\[:, 1\]"):
        buffer.rewrite([first[1], second[0]], reward=[90.0, 90.0])
    assert 90 not in [reward for episode in buffer.episodes(unfinished=True) for reward in episode["reward"].tolist()]
    assert buffer.rewrite([first[0], second[0]], obs=[7, 8]) == 2, "an observation it has"
    assert buffer.rewrite([first[0], first[1]], obs=[7, 8], reward=[0.0, 90.0]) == 2, "of whole rows one call"


LINKED = [
    tr.Transitions(),
    tr.Transitions(n_step=2),
    tr.Sequences(2, stride=1),
    tr.Sequences(2, stride=1, across_episodes=True),
]
AS_GIVEN = {
    "as they are": lambda keys: keys,
    "some": lambda keys: keys[1:],
    "one": lambda keys: keys[1:2],
    "of numpy": torch.Tensor.numpy,
}


def rewards_of(buffer):
    return [reward for episode in buffer.episodes(unfinished=True) for reward in episode["reward"].tolist()]


@pytest.mark.parametrize("given", AS_GIVEN)
@pytest.mark.parametrize("view", LINKED, ids=repr)
def test_values_of_steps_are_refused_for_the_keys_of_items_which_name_the_rows_before(view, given):
    buffer, (first, _) = stepped(view)
    batch, before = buffer.gather(first[1:4]), rewards_of(buffer)
    keys = AS_GIVEN[given](batch["key"])
    for fields in ({"reward": [90.0] * len(keys)}, {"reward": [90.0] * len(keys), "obs": [7] * len(keys)}):
        with pytest.raises(ValueError, match=r"keys of a batch's items.*rows_of\(batch\)\[:, 1\]"):
            buffer.rewrite(keys, **fields)
    assert rewards_of(buffer) == before
    assert buffer.rewrite(keys, obs=[7] * len(keys)) == len(keys), "an observation lies there"
    assert buffer.rewrite(buffer.rows_of(batch)[:, 1], reward=[90.0] * 3) == 3
    assert [reward == 90 for reward in rewards_of(buffer)] == [1 < k + 1 <= 4 for k in range(len(before))]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("dataset", [None, tr.ReplayDataset, StagedDataset])
def test_the_keys_of_a_batch_that_was_drawn_are_refused_as_well(dataset, prefetch):
    buffer, (first, second) = stepped(tr.Transitions())
    buffer.discard([first[0], second[0]])  # rows that begin an episode are refused in any case
    batch = next(iter(dataset(buffer, 4, prefetch=prefetch))) if dataset else buffer.sample(4)
    with pytest.raises(ValueError, match="keys of a batch's items"):
        buffer.rewrite(batch["key"], reward=[90.0] * 4)
    assert buffer.rewrite(buffer.rows_of(batch)[:, 1], reward=[90.0] * 4)


def test_the_keys_of_a_batch_that_a_worker_has_drawn_are_refused_as_well():
    buffer, (first, second) = stepped(tr.Transitions(), sampler=tr.Fifo())
    buffer.discard([first[0], second[0]])
    for batch in tr.QueueLoader(tr.ReplayDataset(buffer, 4, steps=1), num_workers=1):
        with pytest.raises(ValueError, match="keys of a batch's items"):
            buffer.rewrite(batch["key"], reward=[90.0] * 4)
        assert buffer.rewrite(buffer.rows_of(batch)[:, 1], reward=[90.0] * 4) == 4


def test_keys_of_rows_are_taken_whatever_was_drawn():
    buffer, (first, _) = stepped(tr.Transitions())
    steps = buffer.rows_of(buffer.gather(first[:3]))[:, 1]
    following = buffer.gather(steps)  # such as for what the states are worth that the steps led to
    assert buffer.rewrite(steps, reward=following["reward"]) == 3
    assert rewards_of(buffer)[:5] == [2.0, 3.0, 4.0, 4.0, 5.0]


def test_windows_across_episodes_are_rewritten_with_the_rows_that_begin_one():
    buffer, (first, second) = stepped(tr.Sequences(4, across_episodes=True))
    assert buffer.rewrite([first[-1], second[0]], reward=[90.0, 0.0]) == 2


def test_values_that_name_no_field_are_refused():
    with pytest.raises(ValueError, match="name no field"):
        filled().rewrite([1], nest={})


def test_n_step_returns_use_the_new_rewards():
    buffer, _ = stepped(tr.Transitions(n_step=3, gamma=0.5))
    anchors = buffer.keys()
    rows = buffer.rows_of(anchors)
    rewards = {int(key): 10.0 * int(key) for key in rows[:, 1:].flatten() if key >= 0}
    assert buffer.rewrite(list(rewards), reward=list(rewards.values())) == len(rewards)
    batch = buffer.gather(anchors)
    expected = [sum(0.5**k * rewards[int(key)] for k, key in enumerate(row[1:]) if key >= 0) for row in rows]
    assert batch["reward"].tolist() == expected


def test_rows_of_items_are_the_anchor_and_the_steps_behind_it():
    buffer, (first, second) = stepped(tr.Transitions(n_step=2))
    assert buffer.rows_of([first[0], first[4], second[2]]).tolist() == [
        first[0:3],
        [first[4], first[5], -1],
        second[2:5],
    ]
    assert buffer.rows_of(buffer.gather([first[1]])).tolist() == [first[1:4]]
    assert filled().rows_of([4, 5]).tolist() == [[4], [5]]
    with pytest.raises(ValueError, match="key 99 at index 0 was never issued"):
        buffer.rows_of([99])


def test_a_batch_keeps_the_values_of_when_it_was_drawn():
    buffer = filled()
    batch = buffer.sample(8)
    stream = iter(tr.ReplayDataset(buffer, 8, prefetch=2))
    ahead = next(stream)
    buffer.rewrite(buffer.keys(), x=np.ones((10, 3)))
    assert not batch["x"].any()
    assert not ahead["x"].any()
    assert buffer.sample(8)["x"].all()
    stream.close()


def test_priorities_and_counts_stay():
    buffer = filled(sampler=tr.Prioritized())
    buffer.update_priorities(buffer.keys(), np.arange(10) + 1.0)
    before, stats = buffer.priorities(buffer.keys()), buffer.stats()
    buffer.rewrite(buffer.keys(), x=np.ones((10, 3)))
    assert torch.equal(buffer.priorities(buffer.keys()), before)
    assert buffer.stats().inserted == stats.inserted


@pytest.mark.parametrize("sampler", [tr.Uniform(), tr.Prioritized()])
@pytest.mark.parametrize("view", [tr.Transitions(n_step=2), tr.Sequences(2)])
def test_a_discarded_item_is_drawn_no_more_whatever_comes(tmp_path, sampler, view):
    buffer, (first, second) = stepped(view, sampler=sampler)
    gone = buffer.keys()[[0, 2]].tolist()
    left = [key for key in buffer.keys().tolist() if key not in gone]
    assert buffer.discard(gone) == 2
    if isinstance(sampler, tr.Prioritized):
        buffer.update_priorities(gone, [9.0, 9.0])
        assert buffer.stats().unready_updates == 2
    buffer.save(tmp_path / "saved")
    for kept in (buffer, buffer.copy(), tr.ReplayBuffer.load(tmp_path / "saved")):
        assert kept.keys().tolist() == left
        assert set(kept.sample(3)["key"].tolist()) <= set(left)
        assert kept.num_items == len(left)
        assert kept.gather(gone)["key"].tolist() == []
        assert set(first + second) == set(kept.keys(rows=True).tolist())  # rows stay until the ring turns


def test_a_discarded_row_of_a_file_stays_so_when_all_processes_were_killed(tmp_path):
    path = tmp_path / "ring"

    def die():
        buffer = filled(path=path)
        buffer.discard([3, 4])
        os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=die)
    child.start()
    child.join()
    with tr.ReplayBuffer.open(path) as buffer:
        assert buffer.keys().tolist() == [0, 1, 2, 5, 6, 7, 8, 9]


def test_slots_of_discarded_rows_take_new_ones():
    buffer = filled()
    assert buffer.discard(buffer.gather([0, 1])) == 2
    assert buffer.discard([0]) == 0
    buffer.extend(x=np.zeros((2, 3)), nest={"a": [0, 0], "b": [0, 0]})
    assert buffer.keys().tolist() == list(range(2, 12))
    assert buffer.discard([0, 1, 2]) == 1


def test_an_item_that_is_not_complete_yet_can_be_discarded():
    buffer, _ = stepped(tr.Transitions(n_step=2))
    writer = buffer.writer()
    key = writer.reset(obs=0)
    assert buffer.discard([int(key)]) == 1
    for i in range(3):
        writer.step(obs=i, action=i, reward=0.0, terminated=i == 2, truncated=False)
    assert buffer.keys().tolist()[-2:] == [int(key) + 1, int(key) + 2]


@pytest.mark.parametrize("view", [tr.Transitions(n_step=2), tr.Sequences(2), tr.Sequences(2, across_episodes=True)])
def test_an_episode_is_discarded_with_all_its_rows(view):
    buffer, (first, second) = stepped(view)
    assert buffer.discard_episode(first[3]) == len(first)
    assert set(buffer.keys().tolist()) <= set(second)
    assert buffer.discard_episode(second[0]) == len(second)
    assert buffer.num_items == 0
    with pytest.raises(tr.WouldBlockForever):
        buffer.sample(1)


def test_an_episode_whose_row_is_gone_is_left_alone_and_keys_are_checked():
    buffer, (first, _) = stepped(tr.Transitions(), capacity=8)
    assert buffer.discard_episode(first[0]) == 0
    with pytest.raises(ValueError, match="key 50 at index 0 was never issued"):
        buffer.discard_episode(50)
    with pytest.raises(ValueError, match="expected the key of one row, an integer"):
        buffer.discard_episode([1])
    with pytest.raises(ValueError, match=r"the view is Rows\(\): its rows belong to no episode; discard\(keys\)"):
        filled().discard_episode(0)
    with pytest.raises(ValueError, match="key 77 at index 0 was never issued"):
        buffer.discard([77])


def test_a_closed_buffer_says_so():
    buffer = filled()
    buffer.close()
    for call in (
        lambda: buffer.rewrite([1], nest={"a": [1]}),
        lambda: buffer.discard([1]),
        lambda: buffer.rows_of([1]),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def rewrite_all(buffer, over):
    keys, call = buffer.keys(rows=True), 0
    while not over.is_set():
        call += 1
        new = np.arange(len(keys)) + 1000.0 * call
        buffer.rewrite(keys, reward=new, obs=np.repeat(new[:, None], 64, 1), action=new)


def test_batches_beside_another_process_that_rewrites_all_rows_have_one_version_of_each():
    spec = {
        "obs": tr.Field((64,), torch.float64),
        "action": tr.Field((), torch.float64),
        "reward": tr.Field((), torch.float64),
        "row": tr.Field((), torch.int64),
        "terminated": tr.Field((), torch.bool),
        "truncated": tr.Field((), torch.bool),
    }
    with tr.ReplayBuffer(spec, 64, view=tr.Sequences(4, stride=1), seed=5) as buffer:
        ends = np.zeros(63, bool)
        steps = {
            "action": np.zeros(63),
            "reward": np.zeros(63),
            "row": np.arange(63),
            "terminated": ends,
            "truncated": ends,
        }
        buffer.extend(obs=np.zeros((64, 64)), **steps)
        over = multiprocessing.get_context("fork").Event()
        child = multiprocessing.get_context("fork").Process(target=rewrite_all, args=(buffer, over))
        child.start()
        calls = set()
        try:
            while len(calls) < 50:  # of which batches had values
                batch = buffer.sample(16)
                action, reward, row = (batch[name].flatten() for name in ("action", "reward", "row"))
                assert torch.equal(action, reward)
                assert torch.equal(batch["obs"][:, 1:].flatten(0, 1), reward[:, None].expand(-1, 64))
                of_row = dict(zip(row.tolist(), reward.tolist(), strict=True))
                assert [of_row[key] for key in row.tolist()] == reward.tolist()
                calls |= set((reward // 1000).tolist())
        finally:
            over.set()
            child.join()


def test_writers_get_on_beside_one_who_rewrites_and_no_row_is_lost():
    buffer = filled()
    over = threading.Event()

    def rewrite():
        while not over.is_set():
            keys = buffer.keys(rows=True)
            buffer.rewrite(keys, x=np.ones((len(keys), 3)))

    thread = threading.Thread(target=rewrite)
    thread.start()
    keys = [int(buffer.extend(x=np.zeros((1, 3)), nest={"a": [i], "b": [0]})[0]) for i in range(500)]
    over.set()
    thread.join()
    # A writer passes over a slot that somebody keeps in use. The key of such a slot has no row.
    assert all(old < new for old, new in itertools.pairwise(keys))
    head = buffer.stats().rows_written
    assert head == keys[-1] + 1
    there = [i for i, key in enumerate(keys) if key >= head - buffer.capacity]
    assert buffer.keys(rows=True).tolist()[-len(there) :] == [keys[i] for i in there]
    assert buffer.gather([keys[i] for i in there])["nest"]["a"].tolist() == there
    after = buffer.extend(x=np.zeros((10, 3)), nest={"a": np.arange(10), "b": [0] * 10})
    assert after.tolist() == list(range(head, head + 10)), "nobody keeps a slot in use now"


def test_a_discarded_episode_is_no_episode_and_items_count_once(tmp_path):
    buffer, (first, _) = stepped(tr.Transitions())
    assert buffer.discard(first[1:3]) == 2
    assert buffer.discard(first[:3]) == 1, "two of them were"
    assert len(list(buffer.episodes())) == 1, "its rows are there"
    assert buffer.discard_episode(first[3]) == len(first) - 3
    assert buffer.discard_episode(first[3]) == 0
    buffer.save(tmp_path)
    for held in (buffer, tr.ReplayBuffer.load(tmp_path)):
        assert list(held.episodes()) == []
        assert [episode["reward"].tolist() for episode in held.episodes(unfinished=True)] == [[6, 7, 8, 9]]


def test_what_is_discarded_before_anybody_looked_was_inserted_all_the_same():
    buffer = filled(5)
    assert buffer.discard([0, 1]) == 2
    assert buffer.stats().inserted == 5


@pytest.mark.parametrize("key", [True, 2**70, -1, 1.0, "1", None])
def test_an_episodes_key_is_one_of_a_row(key):
    buffer, _ = stepped(tr.Transitions())
    with pytest.raises(ValueError, match=r"expected the key of one row"):
        buffer.discard_episode(key)


@pytest.mark.parametrize("at", [1, 2])
def test_a_checkpoint_of_long_rows_has_no_row_of_old_and_new_values(tmp_path, monkeypatch, at):
    # Rows of over 4 MiB are written to the disk from where they lie. The rewrite comes in the midst of that.
    size = 600_000
    buffer = tr.ReplayBuffer({"a": tr.Field((size,)), "b": tr.Field((size,))}, 2)
    keys = buffer.extend(a=torch.zeros(1, size), b=torch.zeros(1, size))
    write, calls = buffer_checkpoint.write_shard, []

    def write_between(path, tensors, room):
        calls.append(path)
        names = list(tensors)[:at]
        copied = {name: tensors[name].clone() for name in names}  # what is on the disk already
        buffer.rewrite(keys, a=torch.ones(1, size), b=torch.ones(1, size))
        return write(path, tensors | copied, room)

    monkeypatch.setattr(buffer_checkpoint, "write_shard", write_between)
    buffer.save(tmp_path)
    assert calls
    with tr.ReplayBuffer.load(tmp_path) as loaded:
        batch = loaded.gather(keys)
        assert batch["a"].eq(1).all()
        assert batch["b"].eq(1).all()
