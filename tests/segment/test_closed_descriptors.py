"""Programs that close descriptors which they do not know, as daemons do when they start: buffers notice, and say so."""

import os
import time

import numpy as np
import pytest
import torch
from forked import Forked

import torchreplay as tr

CLOSED = "somebody else has closed the replay buffer's descriptors, as os.closerange"


def make():
    buffer = tr.ReplayBuffer({"x": tr.Field((2,))}, 100)
    buffer.handle()
    buffer.extend(x=np.zeros((10, 2)))
    return buffer


def reuse_descriptors(tmp_path):
    """Closes all that a daemon does not know, and opens files under the same numbers."""
    os.closerange(3, 4096)
    return [os.open(tmp_path / f"{k}.bin", os.O_RDWR | os.O_CREAT) for k in range(40)]


def run_forked(body, *args):
    with Forked(body, *args) as child:
        assert child.wait() == 0


def until_refused(call, seconds=30):
    end = time.monotonic() + seconds

    def call_again_and_again():
        while time.monotonic() < end:
            call()
            time.sleep(0.001)

    with pytest.raises(RuntimeError, match=CLOSED):
        call_again_and_again()


@pytest.mark.parametrize("reopened", [False, True])
def test_a_writer_whose_descriptors_were_closed_stops_writing_within_a_second_or_two(tmp_path, reopened):
    buffer = make()

    def write():
        writer = buffer.writer()
        writer.append(x=np.ones(2))
        if reopened:
            reuse_descriptors(tmp_path)
        else:
            os.closerange(3, 4096)
        until_refused(lambda: writer.append(x=np.ones(2)))

    run_forked(write)
    buffer.extend(x=np.ones((100, 2)))
    assert buffer.sample(100)["x"].eq(1).all()


def test_a_learner_whose_descriptors_were_closed_is_told():
    buffer = make()

    def learn():
        buffer.sample(4)
        os.closerange(3, 4096)
        until_refused(lambda: buffer.sample(4))
        with pytest.raises(RuntimeError, match=CLOSED):
            buffer.stats()
        with pytest.raises(RuntimeError, match=CLOSED):
            buffer.handle()

    run_forked(learn)
    assert len(buffer.sample(4)["key"]) == 4


def test_a_forked_child_that_closes_all_descriptors_before_it_writes_is_told(tmp_path):
    buffer = make()

    def write():
        reuse_descriptors(tmp_path)
        with pytest.raises(RuntimeError, match=CLOSED):
            buffer.writer()

    run_forked(write)


def test_a_buffer_closes_no_descriptor_of_others_that_has_got_the_number_of_its_own(tmp_path):
    def close():
        buffer, weights = make(), tr.SharedWeights(torch.nn.Linear(2, 2))
        writer = buffer.writer()
        writer.append(x=np.ones(2))
        files = reuse_descriptors(tmp_path)
        writer.close()
        buffer.close()
        del writer, buffer, weights
        for fd in files:
            os.fstat(fd)

    run_forked(close)


@pytest.mark.slow
def test_a_buffer_attached_after_that_is_as_good_as_any_whatever_becomes_of_the_one_before():
    buffer = make()
    handle = buffer.handle()

    def work():
        before = buffer
        writer = before.writer()
        writer.append(x=np.ones(2))
        os.closerange(3, 4096)
        after = tr.ReplayBuffer.attach(handle)
        keep = after.writer()
        keep.append(x=np.ones(2))
        writer.close()
        before.close()
        del writer
        assert after.stats().writers == 2  # this one, and that of the parent's thread
        end = time.monotonic() + 2.5  # it looks after its descriptors once a second
        while time.monotonic() < end:
            keep.append(x=np.ones(2))
            time.sleep(0.01)
        assert len(after.sample(4)["key"]) == 4

    run_forked(work)
