"""Buffers in files: what comes back after every end of their processes, and what is refused."""

import logging
import multiprocessing as mp
import os
import pickle
import random
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters

import torchreplay as tr

SPEC = {"number": tr.Field((), torch.int64), "wide": {"image": tr.Field((600,), torch.int32)}}
ENDS = {"terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}
ALPHA = 0.7


@pytest.fixture
def path(tmp_path):
    return tmp_path / "replay.bin"


def rows(first, n):
    """Rows whose values all follow from their number."""
    numbers = torch.arange(first, first + n)
    return {"number": numbers, "wide": {"image": image_of(numbers)}}


def image_of(numbers):
    return (numbers[:, None] * 1000 + torch.arange(600)).int()


def make(path, capacity=100, **options):
    return tr.ReplayBuffer(
        SPEC, capacity, **{"sampler": tr.Prioritized(alpha=ALPHA), "seed": 3, "path": path, **options}
    )


def assert_equal_batches(ours, theirs):
    for name in ("number", "key", "probability", "weight"):
        assert torch.equal(ours[name], theirs[name]), name
    assert torch.equal(ours["wide"]["image"], theirs["wide"]["image"])


def assert_priorities_add_up(buffer):
    """The sums that draws descend along are those of the leaves, to the last grid step."""
    leaves = buffer._segment.column(-1).double()
    assert buffer.stats().priority_total == pytest.approx(float(leaves.sum()), rel=1e-6, abs=1e-6)
    assert buffer.stats().drawable == int((leaves > 0).sum())


# What comes back


def test_a_buffer_that_is_closed_and_opened_goes_on_as_if_nothing_had_happened(path):
    in_file, in_memory = make(path), make(None)
    written = 0
    for turn in range(6):
        for buffer in (in_file, in_memory):
            buffer.extend(**rows(written, 35), priority=torch.arange(35) % 5 + 0.5)
        written += 35
        for _ in range(3):
            ours, theirs = in_file.sample(16), in_memory.sample(16)
            assert_equal_batches(ours, theirs)
            for buffer, batch in ((in_file, ours), (in_memory, theirs)):
                buffer.update_priorities(batch, torch.arange(16.0) * (turn + 1))
        in_file.close()
        in_file = tr.ReplayBuffer.open(path)
        before, after = in_memory.stats().as_dict(), in_file.stats().as_dict()
        for name in ("writers", "learners", "last_write_age"):  # these are of processes
            del before[name], after[name]
        assert before == after
    assert (in_file.spec, in_file.sampler, in_file.limiter) == (in_memory.spec, in_memory.sampler, in_memory.limiter)


def test_feedback_for_a_batch_drawn_before_the_file_was_closed_is_applied(path):
    buffer = make(path)
    buffer.extend(**rows(0, 30))
    batch = buffer.sample(8)
    buffer.close()
    again = tr.ReplayBuffer.open(path)
    again.update_priorities(batch, torch.ones(8))
    assert again.stats().updated == 8
    assert again.extend(**rows(30, 2)).tolist() == [30, 31]


def episodes(view, path):
    spec = {"obs": tr.Field((2,)), "reward": tr.Field(), **ENDS}
    buffer = tr.ReplayBuffer(spec, 50, view=view, sampler=tr.Prioritized(), path=path, seed=1)
    steps = np.arange(12)
    for episode in range(7):
        buffer.extend(
            obs=np.arange(26).reshape(13, 2) + 100 * episode,
            reward=steps + 0.5,
            terminated=steps == 11,
            truncated=steps < 0,
            priority=steps + episode,
        )
    writer = buffer.writer()
    writer.reset(obs=np.zeros(2))
    for step in range(5):
        key = writer.step(obs=np.full(2, step), reward=0.0, terminated=False, truncated=False)
    return buffer, key


@pytest.mark.parametrize(
    "view",
    [
        tr.Transitions(n_step=3, stack={"obs": 2}),
        tr.Sequences(4, stride=2, burn_in=1),
        tr.Sequences(3, across_episodes=True),
    ],
    ids=["transitions", "sequences", "across"],
)
def test_items_of_linked_rows_come_back_whole_and_incomplete_ones_stay_so(view, path):
    in_memory, key = episodes(view, None)
    episodes(view, path)[0].close()
    in_file = tr.ReplayBuffer.open(path)
    every = torch.arange(key + 1)
    ours, theirs = in_memory.gather(every), in_file.gather(every)
    assert len(ours["key"]) > 0
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    writer = in_file.writer()
    with pytest.raises(ValueError, match="reset"):
        writer.step(obs=np.zeros(2), reward=0.0, terminated=False, truncated=False)


def test_the_reward_function_of_hindsight_is_given_again(path):
    def closeness(achieved, desired):
        return -(achieved - desired).abs()[:, 0]

    view = tr.Hindsight(closeness, "obs", "goal", observation=("obs", "goal"))
    spec = {"obs": tr.Field((1,)), "goal": tr.Field((1,)), "reward": tr.Field(), **ENDS}
    buffer = tr.ReplayBuffer(spec, 50, view=view, path=path)
    last = np.arange(4) == 3
    buffer.extend(
        obs=np.arange(5)[:, None], goal=np.full((5, 1), 9), reward=np.ones(4), terminated=last & False, truncated=last
    )
    buffer.close()
    with pytest.raises(ValueError, match="expected the buffer's own"):
        tr.ReplayBuffer.open(path, view=tr.Rows())
    batch = tr.ReplayBuffer.open(path, view=view).sample(64)
    relabelled = batch["relabelled"]
    assert torch.equal(batch["reward"][relabelled], -(batch["next_obs"] - batch["next_goal"]).abs()[relabelled, 0])


def test_a_stopped_buffer_is_opened_to_go_on(path):
    buffer = make(path)
    buffer.stop()
    buffer.close()
    again = tr.ReplayBuffer.open(path)
    assert not again.stopped
    again.extend(**rows(0, 1))


def test_a_checkpoint_is_loaded_into_a_file(path, tmp_path):
    buffer = make(None)
    buffer.extend(**rows(0, 120))
    buffer.save(tmp_path / "checkpoint")
    tr.ReplayBuffer.load(tmp_path / "checkpoint", path=path).close()
    again = tr.ReplayBuffer.open(path)
    assert_equal_batches(again.sample(32), buffer.sample(32))
    (shard,) = (tmp_path / "checkpoint").glob("rows-*/*")
    shard.unlink()
    with pytest.raises(tr.CheckpointError, match="damaged"):
        tr.ReplayBuffer.load(tmp_path / "checkpoint", path=tmp_path / "other.bin")
    assert not (tmp_path / "other.bin").exists()


# Who has it open


def test_a_file_that_is_open_is_opened_as_the_buffer_that_it_is(path):
    buffer = make(path)
    other = tr.ReplayBuffer.open(path)
    other.extend(**rows(0, 3))
    assert len(buffer) == 3
    with Forked(lambda: tr.ReplayBuffer.open(path).extend(**rows(3, 4))) as child:
        assert child.wait() == 0
    assert len(buffer) == 7
    buffer.close()
    other.extend(**rows(7, 2))
    other.close()
    assert len(tr.ReplayBuffer.open(path)) == 9


def test_a_forked_child_keeps_the_file_in_use_when_its_parent_is_killed(path):
    ours, theirs = mp.Pipe()

    def parent():
        buffer = make(path)
        if os.fork():
            theirs.send("forked")
            signal.pause()
        theirs.recv()
        buffer.extend(**rows(0, 5))
        theirs.send("written")
        theirs.recv()
        os._exit(0)

    with Forked(parent) as killed:
        assert ours.recv() == "forked"
        killed.kill()
    buffer = tr.ReplayBuffer.open(path)
    ours.send("write")
    assert ours.recv() == "written"
    assert len(buffer) == 5
    ours.send("end")


def open_append_and_close(path, index, turns, acknowledged):
    for turn in range(turns):
        with tr.ReplayBuffer.open(path) as buffer:
            buffer.extend(**rows(index * 1000 + turn, 1))
            acknowledged[index] = turn + 1


def churn(path, processes, turns):
    make(path, capacity=processes * turns).close()
    acknowledged = shared_counters(processes)
    children = [Forked(open_append_and_close, path, index, turns, acknowledged) for index in range(processes)]
    assert [child.wait() for child in children] == [0] * processes
    numbers = tr.ReplayBuffer.open(path).gather(torch.arange(processes * turns))["number"]
    assert sorted(numbers.tolist()) == [index * 1000 + turn for index in range(processes) for turn in range(turns)]


def test_processes_that_open_and_close_one_file_all_the_time_lose_nothing(path):
    churn(path, processes=3, turns=12)


@pytest.mark.soak
def test_processes_that_open_and_close_one_file_a_thousand_times_lose_nothing(path):
    churn(path, processes=4, turns=250)


# Killed processes


def own(path, ready, view):
    buffer = make_numbered(path, view)
    ready[0] = 1
    while buffer:
        signal.pause()


def make_numbered(path, view):
    spec = {**SPEC, "obs": tr.Field(()), "reward": tr.Field(), **ENDS}
    return tr.ReplayBuffer(spec, 3000, view=view, sampler=tr.Prioritized(alpha=ALPHA), path=path, seed=5)


STEPS, EPISODE = 1000, 7
N_STEP, GAMMA = 3, 0.99


def write(path, index, acknowledged):
    """Steps of episodes whose values follow from writer and step; `acknowledged` counts those that were written."""
    buffer = tr.ReplayBuffer.open(path)
    writer, linked = buffer.writer(), not isinstance(buffer.view, tr.Rows)
    for count in range(STEPS):
        number = index * 1_000_000 + count
        values = {"number": number, "wide": {"image": image_of(torch.tensor([number]))[0]}, "reward": float(count % 11)}
        flags = {"terminated": count % EPISODE == EPISODE - 1, "truncated": False}
        if not linked:
            writer.append(**values, **flags, obs=float(count))
        else:
            if count % EPISODE == 0:
                writer.reset(obs=-1.0)
            writer.step(**values, **flags, obs=float(count))
        acknowledged[index] = count + 1
    while writer:
        signal.pause()


def td_of(keys):
    return keys % 13 + 1.0


def learn(path, acknowledged):
    buffer = tr.ReplayBuffer.open(path)
    while True:
        batch = buffer.sample(32)
        buffer.update_priorities(batch, td_of(batch["key"]))
        acknowledged[-1] = 1


def run_and_kill(path, view, chance, writers=2):
    """Starts owner, writers and a learner, kills them all at a random moment; returns what the writers were told."""
    ready, acknowledged = shared_counters(1), shared_counters(writers + 1)
    processes = []
    try:
        if path.exists():
            tr.ReplayBuffer.open(path).close()  # by a process that goes: the next to open it finds nobody
        else:
            processes.append(Forked(own, path, ready, view))
            eventually(lambda: ready[0])
        processes += [Forked(write, path, index, acknowledged) for index in range(writers)]
        processes.append(Forked(learn, path, acknowledged))
        least = chance.randrange(1, STEPS)
        eventually(lambda: all(acknowledged[index] >= least for index in range(writers)) and acknowledged[writers])
        chance.shuffle(processes)
        for process in processes:
            process.signal(signal.SIGKILL)
    finally:
        for process in processes:
            process.kill()
    return [acknowledged[index] for index in range(writers)]


def assert_items_are_whole(view, batch):
    """Every value follows from the number of the item's first step."""
    assert torch.equal(batch["wide"]["image"], image_of(batch["number"])), "torn row"
    count = batch["number"] % 1_000_000
    steps = 1 if isinstance(view, tr.Rows) else N_STEP
    taken = (EPISODE - count % EPISODE).clamp(max=steps)
    assert torch.equal(batch["terminated"], (count + taken) % EPISODE == 0)
    rewards = sum(GAMMA**k * ((count + k) % 11) * (k < taken) for k in range(steps))
    assert torch.allclose(batch["reward"], rewards.float())


def kill_everyone(rounds, view, seed):
    chance = random.Random(seed)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "replay.bin"
            told = run_and_kill(path, view, chance)
            buffer = tr.ReplayBuffer.open(path)
            stats = buffer.stats()
            assert stats.rows_written <= buffer.capacity, "the test is about a ring that never turned"
            assert stats.dropped_rows <= len(told)
            batch = buffer.gather(torch.arange(stats.rows_written))
            assert_items_are_whole(view, batch)
            for index, count in enumerate(told):
                mine = batch["number"][batch["number"] // 1_000_000 == index] - index * 1_000_000
                expect_rows_of(view, mine, count)
            assert_priorities_add_up(buffer)
            assert_leaves_are_given_or_initial(buffer, batch["key"])
            assert (stats.writers, stats.learners) == (0, 0)
            buffer.sample(16)
            buffer.close()


def expect_rows_of(view, mine, count):
    """Every acknowledged row is there, and at most the one being written besides."""
    if isinstance(view, tr.Rows):
        assert mine.tolist() in (list(range(count)), list(range(count + 1)))
        return
    # Items are anchored at the row before; number and flags are of its first step. All but the last two of a tail that
    # has no end are complete.
    episodes_done = count - count % EPISODE
    least = max(episodes_done, count - (N_STEP - 1))
    assert mine.tolist()[:least] == list(range(least))
    assert len(mine) <= count + 1


def assert_leaves_are_given_or_initial(buffer, keys):
    """A leaf is what a TD error made it or, until then, that of some largest priority: one of thirteen values and 1."""
    leaves = buffer._segment.column(-1)[keys % buffer.capacity].double()
    possible = (torch.arange(14.0, dtype=torch.float64).clamp(min=1) + 1e-6) ** ALPHA
    assert bool(((leaves[:, None] - possible).abs().min(1).values < 1e-3).all())
    own_value = (td_of(keys).double() + 1e-6) ** ALPHA
    assert bool(((leaves - own_value).abs() < 1e-3).any()), "no TD error came back"


VIEWS = [tr.Rows(), tr.Transitions(n_step=N_STEP, gamma=GAMMA)]


@pytest.mark.parametrize("view", VIEWS, ids=["rows", "transitions"])
def test_sigkill_of_every_process_loses_at_most_the_row_that_each_writer_was_writing(view):
    kill_everyone(6, view, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("view", VIEWS, ids=["rows", "transitions"])
def test_sigkill_of_every_process_300_times_loses_at_most_the_row_that_each_writer_was_writing(view):
    kill_everyone(300, view, seed=2)


def lap(path, progress):
    buffer = tr.ReplayBuffer.open(path) if path.exists() else make(path, capacity=16)
    number = 0
    while True:
        buffer.extend(**rows(number, 5))
        buffer.sample(4)
        number += 5
        progress[0] += 1


def lap_and_kill(path, rounds, seed):
    chance, progress = random.Random(seed), shared_counters(1)
    for _ in range(rounds):
        progress[0] = 0
        with Forked(lap, path, progress) as process:
            eventually(lambda: progress[0] >= chance.randrange(1, 40), interval=0)
            process.kill()
    with tr.ReplayBuffer.open(path) as buffer:
        batch = buffer.sample(200)
        assert torch.equal(batch["wide"]["image"], image_of(batch["number"])), "torn row"
        assert_priorities_add_up(buffer)
        buffer.extend(**rows(0, 16))
        assert len(buffer) == 16


def test_a_file_whose_only_process_is_killed_again_and_again_while_its_ring_turns_stays_whole(path):
    lap_and_kill(path, 15, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_file_whose_only_process_is_killed_1000_times_while_its_ring_turns_stays_whole(path):
    lap_and_kill(path, 1000, seed=2)


def append_huge_rows(path, progress):
    buffer = tr.ReplayBuffer({"x": tr.Field((1 << 22,), torch.uint8)}, 3, path=path)
    writer, value = buffer.writer(), np.full(1 << 22, 7, np.uint8)
    while True:
        writer.append(x=value)
        progress[0] += 1


def test_rows_that_were_being_written_are_dropped_counted_and_logged(path, caplog):
    progress = shared_counters(1)
    for _ in range(50):  # nearly all of the time goes into copying a row
        path.unlink(missing_ok=True)
        progress[0] = 0
        with Forked(append_huge_rows, path, progress) as writer:
            eventually(lambda: progress[0] > 5, interval=0)
            writer.kill()
        with caplog.at_level(logging.WARNING, "torchreplay"):
            buffer = tr.ReplayBuffer.open(path)
        if buffer.stats().dropped_rows:
            break
    assert buffer.stats().dropped_rows == 1
    assert "dropped 1 rows" in caplog.text
    assert len(buffer) == 2
    assert bool((buffer.sample(8)["x"] == 7).all())
    with buffer.writer() as again:
        for _ in range(3):
            again.append(x=np.zeros(1 << 22, np.uint8))
    assert len(buffer) == 3
    buffer.close()
    caplog.clear()
    assert tr.ReplayBuffer.open(path).stats().dropped_rows == 1, "a total"
    assert caplog.text == ""


# Refusals


def test_a_path_that_is_taken_names_open_and_stays_as_it_is(path):
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"ReplayBuffer\.open"):
        make(path)
    assert path.read_text() == "mine"


def test_a_missing_directory_and_a_missing_file_are_said_to_be_missing(path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make(path.parent / "nowhere" / "replay.bin")
    with pytest.raises(FileNotFoundError, match=path.name):
        tr.ReplayBuffer.open(path)
    with pytest.raises(IsADirectoryError):
        tr.ReplayBuffer.open(path.parent)


def test_a_disk_with_too_little_room_is_an_error_with_the_numbers_and_leaves_nothing(path):
    with pytest.raises(OSError, match=r"needs [\d.]+ GiB, and the disk has [\d.]+ GiB left") as caught:
        make(path, capacity=1 << 31)
    assert caught.value.errno == 28
    assert list(path.parent.iterdir()) == []


def test_a_filesystem_without_byte_locks_is_an_error_and_leaves_nothing(path, monkeypatch):
    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    with pytest.raises(OSError, match="no locks of single bytes"):
        make(path)
    assert list(path.parent.iterdir()) == []


def test_only_the_owner_can_read_the_file(path):
    before = os.umask(0)
    try:
        make(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_of_another_user_is_refused(path, monkeypatch):
    make(path).close()
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="only the user who owns"):
        tr.ReplayBuffer.open(path)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * 8192, bytes(1 << 20)])
def test_what_is_no_buffer_is_refused(content, path):
    path.write_bytes(content)
    with pytest.raises(tr.CheckpointError, match=r"too short|not a replay segment"):
        tr.ReplayBuffer.open(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(tr.CheckpointError, match="no regular file"):
        tr.ReplayBuffer.open(path)


def poke(path, offset, content):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_a_file_of_another_version_says_which(path):
    make(path).close()
    poke(path, 8, struct.pack("Q", 99))
    with pytest.raises(tr.CheckpointError, match="format version 99"):
        tr.ReplayBuffer.open(path)


def test_a_file_of_another_layout_is_refused(path):
    make(path).close()
    poke(path, 16, struct.pack("Q", 99))
    with pytest.raises(tr.CheckpointError, match="incompatible build"):
        tr.ReplayBuffer.open(path)


def test_a_shortened_or_lengthened_file_is_refused(path):
    buffer = make(path)
    buffer.extend(**rows(0, 50))
    size = buffer.nbytes
    buffer.close()
    for other in (size - 1, size - 4096, size // 2, 4096, 4095, 1, 0, size + 1):
        copy = path.with_name("copy.bin")
        copy.write_bytes(path.read_bytes()[:other].ljust(other, b"\0"))
        with pytest.raises(tr.CheckpointError, match=r"bytes long"):
            tr.ReplayBuffer.open(copy)


BOOT = 4096 - 64 + 8  # where the file names the boot of the machine


def fill_and_wait(path, ready):
    buffer = make(path)
    buffer.extend(**rows(0, 50), priority=torch.arange(50.0))
    ready[0] = 1
    while buffer:
        signal.pause()


def image_of_a_killed_process(path):
    ready = shared_counters(1)
    with Forked(fill_and_wait, path, ready) as process:
        eventually(lambda: ready[0])
        process.kill()
    return path.read_bytes()


def image_of_a_closed_buffer(path):
    buffer = make(path)
    buffer.extend(**rows(0, 50), priority=torch.arange(50.0))
    buffer.close()
    return path.read_bytes()


def test_after_a_restart_of_the_machine_a_closed_file_opens_and_one_that_was_in_use_does_not(path):
    image_of_a_closed_buffer(path)
    poke(path, BOOT, struct.pack("Q", 12345))
    assert len(tr.ReplayBuffer.open(path)) == 50
    path.unlink()
    image_of_a_killed_process(path)
    poke(path, BOOT, struct.pack("Q", 12345))
    for _ in range(2):
        with pytest.raises(tr.CheckpointError, match="machine was restarted while the buffer was in use"):
            tr.ReplayBuffer.open(path)


LAST_USER = """
import pickle, sys, torch
buffer = pickle.load(sys.stdin.buffer)
print(buffer.path, flush=True)
sys.stdin.buffer.read(1)
writer = buffer.writer()
writer.append(number=0, wide={"image": torch.zeros(600, dtype=torch.int32)})
batch = buffer.sample(2)
"""


def test_a_process_that_got_a_pickle_and_outlives_the_others_puts_the_file_to_rest_when_it_ends(path):
    buffer = make(path)
    with subprocess.Popen([sys.executable, "-c", LAST_USER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(pickle.dumps(buffer))
        process.stdin.flush()
        assert process.stdout.readline().decode().strip() == str(path) == str(buffer.path)
        buffer.close()
        process.stdin.close()
        assert process.wait() == 0
    poke(path, BOOT, struct.pack("Q", 12345))
    assert len(tr.ReplayBuffer.open(path)) == 1
    assert make(None).path is None


# Damage


def try_damaged(image, path, content, damages, tally):
    """In a process of its own: a crash must be seen. Tallies refused, opened and the damage it is at."""
    expected = rows(0, 50)
    for number, damage in enumerate(damages):
        tally[2] = number
        damaged = bytearray(content)
        for position, mask in damage:
            damaged[position] ^= mask
        path.write_bytes(damaged)
        try:
            buffer = tr.ReplayBuffer.open(path)
        except tr.CheckpointError:
            tally[0] += 1
            continue
        tally[1] += 1
        batch = buffer.gather(torch.arange(50))
        wrong = ~(batch["wide"]["image"] == expected["wide"]["image"][batch["key"]]).all(1)
        wrong |= batch["number"] != batch["key"]
        assert int(wrong.sum()) + 50 - len(batch["key"]) <= len(damage), "a row that was not hit is another one"
        assert_priorities_add_up(buffer)
        try:
            buffer.update_priorities(buffer.sample(64), torch.rand(64))
            keys = buffer.extend(**rows(50, 150))
            assert torch.equal(buffer.gather(keys)["number"], torch.arange(100, 200))
        except tr.WouldBlockForever:  # its limiter was hit
            assert image is image_of_a_killed_process
        buffer.close()


def damage_everywhere(image, each, seed):
    """Flips bits of the header, table of participants, configuration and everything else; returns (refused, opened)."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:  # where putting a file to rest takes no time
        path = Path(directory) / "replay.bin"
        content = image(path)
        config = 4096 + 4096 * 64
        size = len(content)
        regions = [(0, 1024), (4096 - 64, 4096), (4096, config), (config, config + 600), (config, size), (0, size)]
        damages = []
        for start, end in regions:
            for _ in range(each):
                hits = chance.randint(1, 3)
                damages.append([(chance.randrange(start, end), 1 << chance.randrange(8)) for _ in range(hits)])
        tally = shared_counters(3)
        with Forked(try_damaged, image, path, content, damages, tally) as process:
            assert process.wait(1200) == 0, f"damage {damages[tally[2]]}"
    assert tally[0] + tally[1] == len(damages)
    return tally[0], tally[1]


IMAGES = [image_of_a_closed_buffer, image_of_a_killed_process]


@pytest.mark.parametrize("image", IMAGES)
def test_a_damaged_file_is_refused_or_opened_without_harm_to_the_rows_that_were_not_hit(image):
    refused, opened = damage_everywhere(image, 60, seed=7)
    assert refused > 60
    assert opened > 60


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("image", IMAGES)
def test_a_file_damaged_in_12_000_ways_is_refused_or_opened_without_harm_to_the_rows_that_were_not_hit(image):
    damage_everywhere(image, 2000, seed=8)
