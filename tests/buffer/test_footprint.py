"""`footprint` names the bytes of a buffer before it is made, and they add up."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import torchreplay as tr

FLAGS = {"terminated": tr.Field((), bool), "truncated": tr.Field((), bool), "reward": tr.Field()}
VIEWS = [None, tr.Transitions(n_step=2), tr.Sequences(3, burn_in=1)]
DTYPES = [torch.uint8, torch.float32, torch.float64, torch.bfloat16]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), max_size=2),
    dtype=st.sampled_from(DTYPES),
    capacity=st.integers(6, 3000),
    view=st.sampled_from(VIEWS),
    prioritized=st.booleans(),
    name=st.sampled_from([None, "red team"]),
)
def test_it_is_what_the_buffer_reserves_to_the_byte(shape, dtype, capacity, view, prioritized, name):
    spec = {"obs": tr.Field(tuple(shape), dtype), **FLAGS}
    sampler = tr.Prioritized() if prioritized else None
    found = tr.footprint(spec, capacity, view=view, sampler=sampler, name=name)
    with tr.ReplayBuffer(spec, capacity, view=view, sampler=sampler, name=name) as buffer:
        assert found.nbytes == buffer.nbytes
    assert sum(found.fields.values()) + sum(found.structures.values()) == found.nbytes
    assert found.fields["obs"] == capacity * torch.empty(shape, dtype=dtype).nbytes
    assert all(size >= 0 for size in found.structures.values())


def test_nothing_is_reserved_for_it():
    """A hundred tebibytes do not fit any machine that runs this."""
    found = tr.footprint({"obs": tr.Field((1 << 15,), torch.uint8)}, 1 << 31)
    assert found.nbytes > 1 << 46


def test_bad_arguments_are_those_of_the_buffer():
    with pytest.raises(ValueError, match="capacity is 0"):
        tr.footprint({"x": tr.Field()}, 0)
    with pytest.raises(ValueError, match="expected a non-empty dict"):
        tr.footprint({}, 10)
