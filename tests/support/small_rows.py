"""Rows to do wrong with: a vector and a nested integer, and the proof that a refusal did no harm."""

import numpy as np
import torch

import torchreplay as tr

SPEC = {"x": tr.Field((4,)), "nested": {"n": tr.Field((), torch.int32)}}


def good_row(value=1.0):
    return {"x": np.full(4, value, np.float32), "nested": {"n": int(value)}}


def assert_nothing_was_written_and_the_buffer_works(buffer):
    issued = buffer.stats().rows_written
    assert len(buffer) == 0
    with buffer.writer() as writer:
        assert writer.append(**good_row(7.0)) == issued
    batch = buffer.sample(3)
    assert batch["x"].eq(7).all()
    buffer.update_priorities(batch, torch.ones(3))
    assert buffer.stats().updated == 3
