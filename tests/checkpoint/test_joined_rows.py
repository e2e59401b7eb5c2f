"""Checkpoints whose rows go into one buffer, beside what each gives alone in the room that it gets."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from saved_rows import assert_rows_are_those_of_their_keys, filled

import torchreplay as tr
from torchreplay.buffer.replay_buffer import local_sampler
from torchreplay.checkpoint.buffer_checkpoint import load_rows
from torchreplay.checkpoint.description import Description

FIELDS = {name: tr.Field((), torch.int64) for name in ("obs", "action")} | {
    "reward": tr.Field(),
    **dict.fromkeys(("terminated", "truncated"), tr.Field((), torch.bool)),
}
VIEW = tr.Transitions(n_step=2, gamma=0.5)


def played(number, steps, capacity, view=VIEW):
    """A buffer of episodes of 7 steps, each value of which says of which buffer and step it is."""
    buffer = tr.ReplayBuffer(FIELDS, capacity, view=view, sampler=tr.Prioritized(alpha=0.7))
    with buffer.writer() as writer:
        for at in range(steps):
            here = 1000 * number + 2 * at
            if at % 7 == 0:
                writer.reset(obs=here)
            writer.step(obs=here + 1, action=at, reward=float(here), terminated=at % 7 == 6, truncated=False)
    keys = buffer.keys()
    buffer.update_priorities(keys, keys % 5 + 1.0)
    return buffer


def items_of(buffers):
    """All items with their raw priorities, in any order."""
    found = []
    for buffer in buffers:
        keys = buffer.keys()
        batch, priorities = buffer.gather(keys), buffer.priorities(keys)
        columns = [batch[name].double() for name in ("obs", "action", "reward", "next_obs")]
        found += torch.stack([*columns, priorities.double()], 1).tolist()
    return sorted(found)


def join(directories, capacity, like, **options):
    """A new buffer of that capacity with the rows of all."""
    spec, config = like.spec, like._config
    buffer = tr.ReplayBuffer(spec, capacity, view=config.view, sampler=config.sampler, **options)
    segment, (home, *others) = local_sampler(buffer).segment, directories
    load_rows(segment, buffer._config, Description.read(home), home, others=others)
    return buffer


@pytest.mark.parametrize(
    ("capacity", "rooms"),
    [(200, (40, 30, 20)), (90, (40, 30, 20)), (60, (20, 20, 20)), (12, (4, 4, 4))],
)
@pytest.mark.parametrize("turned", [False, True])
def test_it_has_the_items_that_each_has_alone_in_its_part_of_the_room(tmp_path, capacity, rooms, turned):
    with ExitStack() as stack:
        buffers, paths = [], [tmp_path / str(number) for number in range(3)]
        for number, rows in enumerate((40, 30, 20)):
            steps = 3 * rows if turned else rows * 7 // 8  # an episode of 7 steps has 8 rows
            buffers.append(stack.enter_context(played(number, steps, rows)))
            buffers[-1].save(paths[number])
        loads = [tr.ReplayBuffer.load(path, room) for path, room in zip(paths, rooms, strict=True)]
        alone = [stack.enter_context(buffer) for buffer in loads]
        made = stack.enter_context(join(paths, capacity, buffers[0]))
        assert items_of([made]) == items_of(alone)
        assert len(made) == sum(rooms)
        assert made.keys(rows=True)[: rooms[0]].tolist() == alone[0].keys(rows=True).tolist()
        told = [buffer.stats() for buffer in buffers]
        for name in ("inserted", "updated", "sampled"):
            assert getattr(made.stats(), name) == sum(getattr(stats, name) for stats in told)
        with made.writer() as writer:  # it goes on
            writer.reset(obs=5)
            for at in range(3):
                writer.step(obs=6 + at, action=at, reward=1.0, terminated=False, truncated=False)
        assert made.gather(made.keys()[-1:])["next_obs"].item() in (7, 8)


@pytest.mark.parametrize(("capacity", "kept"), [(200, (50, 40)), (60, (30, 30))])
def test_values_of_any_length_come_with_their_rows(tmp_path, capacity, kept):
    with filled(50, 50, ragged_bytes=1 << 16) as one, filled(90, 40, ragged_bytes=1 << 16) as other:
        one.save(tmp_path / "one")
        other.save(tmp_path / "other")
        with join([tmp_path / "one", tmp_path / "other"], capacity, one, ragged_bytes=1 << 17) as made:
            due = [*range(50 - kept[0], 50), *range(90 - kept[1], 90)]
            batch = made.gather(made.keys())
            priorities = made.priorities(batch["key"])
            batch["key"] = batch["x"]["a"][:, 0].clone()  # the rows' numbers
            assert batch["key"].tolist() == due
            assert_rows_are_those_of_their_keys(batch)
            assert priorities.tolist() == pytest.approx([number % 7 + 1.0 for number in due], rel=1e-5)


def test_a_damaged_checkpoint_among_them_leaves_the_buffer_empty(tmp_path):
    with played(0, 20, 40) as one, played(1, 20, 40) as other:
        one.save(tmp_path / "one")
        other.save(tmp_path / "other")
        (file,) = (tmp_path / "other").glob("rows-*/*.safetensors")
        content = bytearray(file.read_bytes())
        content[-3] ^= 0xFF
        file.write_bytes(content)
        with tr.ReplayBuffer(FIELDS, 100, view=VIEW, sampler=tr.Prioritized(alpha=0.7)) as buffer:
            segment, home = local_sampler(buffer).segment, tmp_path / "one"
            with pytest.raises(tr.CheckpointError, match=file.name):
                load_rows(segment, buffer._config, Description.read(home), home, others=[tmp_path / "other"])
            assert len(buffer) == 0
            load_rows(segment, buffer._config, Description.read(home), home)
            assert len(buffer) == len(one)


def test_rows_of_another_spec_are_refused(tmp_path):
    with played(0, 20, 40) as one, tr.ReplayBuffer({"x": tr.Field()}, 4) as other:
        other.extend(x=np.zeros(3))
        one.save(tmp_path / "one")
        other.save(tmp_path / "other")
        with pytest.raises(tr.CheckpointError, match="of another spec"):
            join([tmp_path / "one", tmp_path / "other"], 100, one)
