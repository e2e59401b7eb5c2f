"""The priority of a sequence, against the formula of Kapturowski et al. (2019) written out step by step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import torchreplay as tr

shapes = st.tuples(st.integers(0, 5), st.integers(1, 7))


def by_hand(td, mask, eta):
    priorities = []
    for errors, real in zip(td.tolist(), mask.tolist(), strict=True):
        sizes = [abs(error) for error, is_real in zip(errors, real, strict=True) if is_real]
        priorities.append(eta * max(sizes) + (1 - eta) * sum(sizes) / len(sizes) if sizes else 0.0)
    return priorities


@given(data=st.data(), shape=shapes, eta=st.floats(0, 1))
def test_the_priority_mixes_maximum_and_mean_of_the_real_steps(data, shape, eta):
    td = torch.from_numpy(data.draw(hnp.arrays(np.float64, shape, elements=st.floats(-1e6, 1e6))))
    mask = torch.from_numpy(data.draw(hnp.arrays(np.bool_, shape)))
    priority = tr.sequence_priority(td, mask, eta)
    assert (priority.shape, priority.dtype) == ((shape[0],), torch.float64)
    assert priority.tolist() == pytest.approx(by_hand(td, mask, eta), rel=1e-12)


def test_eta_is_nine_tenths_as_in_the_paper():
    td = torch.tensor([[1.0, -3.0, 2.0]])
    assert tr.sequence_priority(td, torch.ones(1, 3, dtype=torch.bool)).item() == pytest.approx(0.9 * 3 + 0.1 * 2)


def test_a_sequence_without_a_real_step_has_priority_zero():
    mask = torch.tensor([[False, False], [True, False]])
    assert tr.sequence_priority(torch.tensor([[5.0, 6.0], [7.0, 8.0]]), mask).tolist() == [0.0, 7.0]


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_stands_in_the_padding_does_not_matter(rubbish):
    mask = torch.tensor([[True, True, False]])
    assert tr.sequence_priority(torch.tensor([[1.0, -1.0, rubbish]]), mask).tolist() == [1.0]


def test_nan_in_a_real_step_is_passed_on_and_refused_by_the_buffer():
    priority = tr.sequence_priority(torch.tensor([[1.0, float("nan")]]), torch.ones(1, 2, dtype=torch.bool))
    assert priority.isnan().tolist() == [True]
    buffer = tr.ReplayBuffer({"x": tr.Field()}, 2, sampler=tr.Prioritized())
    buffer.extend(x=np.zeros(1))
    with pytest.raises(ValueError, match="NaN"):
        buffer.update_priorities(buffer.sample(1), priority)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32])
def test_short_floats_are_summed_in_float32(dtype):
    td = torch.full((1, 4096), 0.125, dtype=dtype)  # 4096 * 0.125 added up in bfloat16 stops far below 512
    td[0, 0] = min(60000.0, torch.finfo(dtype).max)
    priority = tr.sequence_priority(td, torch.ones_like(td, dtype=torch.bool), eta=0.5)
    assert priority.dtype == torch.float32
    expected = by_hand(td.double(), torch.ones_like(td, dtype=torch.bool), 0.5)
    assert priority.tolist() == pytest.approx(expected, rel=1e-6)


def test_no_gradient_passes():
    td = torch.ones(2, 3, requires_grad=True)
    assert not tr.sequence_priority(td, torch.ones(2, 3, dtype=torch.bool)).requires_grad


@pytest.mark.parametrize(
    ("td", "mask", "message"),
    [
        (
            torch.ones(2, 3, 1),
            torch.ones(2, 3, 1, dtype=torch.bool),
            r"td is torch.float32 \[2, 3, 1\]",
        ),
        (torch.ones(3), torch.ones(3, dtype=torch.bool), r"td is torch.float32 \[3\]: expected floats \[B, L\]"),
        (torch.ones(3, 0), torch.ones(3, 0, dtype=torch.bool), r"td is torch.float32 \[3, 0\]"),
        (torch.ones(2, 3).long(), torch.ones(2, 3, dtype=torch.bool), "td is torch.int64"),
        (torch.ones(2, 3), torch.ones(2, 4, dtype=torch.bool), r"mask is torch.bool \[2, 4\]: expected .* \[2, 3\]"),
        (torch.ones(2, 3), torch.ones(3, dtype=torch.bool), "mask is torch.bool"),
        (torch.ones(2, 3), torch.ones(2, 3), "mask is torch.float32"),
    ],
    ids=str,
)
def test_other_shapes_and_dtypes_are_refused(td, mask, message):
    with pytest.raises(ValueError, match=message):
        tr.sequence_priority(td, mask)


@pytest.mark.parametrize("eta", [-0.1, 1.1, float("nan")])
def test_a_share_outside_0_to_1_is_refused(eta):
    with pytest.raises(ValueError, match=r"eta is .*: expected 0 to 1"):
        tr.sequence_priority(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), eta)


@pytest.mark.gpu
def test_priorities_stay_on_the_device_of_the_errors():
    td = torch.randn(8, 5, device="cuda", dtype=torch.float16)
    mask = torch.rand(8, 5, device="cuda") < 0.7
    priority = tr.sequence_priority(td, mask)
    assert (priority.device.type, priority.dtype) == ("cuda", torch.float32)
    assert priority.tolist() == pytest.approx(by_hand(td.double().cpu(), mask.cpu(), 0.9), rel=1e-5)
