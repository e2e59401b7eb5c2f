"""A held batch goes back, is done, or stays held: the table of `docs/queues.md`, for each way of drawing."""

import contextlib
import os
import signal
import threading

import numpy as np
import pytest
from forked import Forked

import torchreplay as tr

BACK, DONE, HELD = "back", "done", "held"
SPEC = {"x": tr.Field((), "int64")}


def act(queue, event):
    """What happens while a batch of two is held."""
    if event == "exception":
        raise FloatingPointError
    if event == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if event == "close":
        queue.close()


def by_sample(queue, event):
    for _ in range(1):
        queue.sample(2)
        act(queue, event)
        if event == "break":
            break


def by_loop(queue, event):
    for _ in tr.ReplayDataset(queue, 2, steps=1 if event == "end" else None):
        act(queue, event)
        if event == "break":
            break


def by_claim(queue, event):
    for _ in range(1):
        with queue.claim(2):
            act(queue, event)
            if event == "break":
                break


def become(queue):
    """What became of the two items that were taken first."""
    held = queue.stats().held_items
    first = queue.sample(1)["x"].item()
    return BACK if first == 0 else HELD if held else DONE


def made(commit="next", **where):
    queue = tr.ReplayBuffer(SPEC, 100, sampler=tr.Fifo(commit=commit), **where)
    queue.extend(x=np.arange(12))
    return queue


WAYS = {"sample": by_sample, "loop": by_loop, "claim": by_claim}
TABLE = [
    ("exception", {"sample": HELD, "loop": DONE, "claim": BACK}),
    ("break", {"sample": HELD, "loop": DONE, "claim": DONE}),
    ("end", {"sample": HELD, "loop": DONE, "claim": DONE}),
]
CELLS = [(event, way, what) for event, row in TABLE for way, what in row.items()]


@pytest.mark.parametrize(("event", "way", "what"), CELLS)
def test_a_batch_whose_thread_goes_on(event, way, what):
    with made() as queue:
        with contextlib.suppress(FloatingPointError):
            WAYS[way](queue, event)
        other = threading.Thread(target=lambda: found.append(become(queue)))
        found = []
        other.start()
        other.join()
        assert found == [what]


@pytest.mark.parametrize(("event", "way", "what"), CELLS)
def test_a_batch_whose_thread_has_ended(event, way, what):
    def body():
        with contextlib.suppress(FloatingPointError):
            WAYS[way](queue, event)

    with made() as queue:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        assert become(queue) == (BACK if what == HELD else what)


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_whose_process_is_killed_goes_back(way):
    with made() as queue:
        with Forked(WAYS[way], queue, "kill") as learner:
            assert learner.wait() == -signal.SIGKILL
        assert become(queue) == BACK


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_whose_queue_is_closed_goes_back(way, tmp_path):
    refused = contextlib.nullcontext() if way == "sample" else pytest.raises(RuntimeError, match="closed")
    with refused:
        WAYS[way](made(path=tmp_path / "queue.bin"), "close")
    with tr.ReplayBuffer.open(tmp_path / "queue.bin") as queue:
        assert become(queue) == BACK


@pytest.mark.parametrize("event", ["exception", "break", "end"])
@pytest.mark.parametrize(("way", "committed"), [("sample", False), ("loop", False), ("claim", True)])
def test_by_hand_only_the_end_of_a_claim_is_a_commit(event, way, committed, tmp_path):
    queue = made("manual", path=tmp_path / "queue.bin")
    with queue, contextlib.suppress(FloatingPointError):
        WAYS[way](queue, event)
    with tr.ReplayBuffer.open(tmp_path / "queue.bin") as queue:
        assert become(queue) == (DONE if committed and event != "exception" else BACK)
