"""A beta that is a function: it is not saved, and goes on where it is given again."""

import logging

import pytest
import torch

import torchreplay as tr

SPEC = {"x": tr.Field()}


def beta(draws):
    return 0.4 + draws / 100


def other(draws):
    return 0.5 + draws / 100


def made(path=None, sampler=None):
    buffer = tr.ReplayBuffer(SPEC, 10, sampler=sampler or tr.Prioritized(beta=beta), path=path, seed=1)
    buffer.extend(x=torch.arange(4.0), priority=torch.arange(4.0) + 1)
    for _ in range(5):
        buffer.sample(2)
    return buffer


def beta_of(buffer):
    """By the weights of a draw, (p / p_min)^-beta (Schaul et al. 2016, section 3.4)."""
    batch = buffer.sample(8)
    share = batch["probability"] / buffer.gather(torch.arange(4))["probability"].min()
    return float(-batch["weight"].log().sum() / share.log().sum())


def saved(tmp_path, way, **options):
    """Has a buffer saved, or left in a file; returns what brings it back."""
    if way == "open":
        made(tmp_path / "ring", **options).close()
        return lambda **given: tr.ReplayBuffer.open(tmp_path / "ring", **given)
    made(**options).save(tmp_path / "saved")
    return lambda **given: tr.ReplayBuffer.load(tmp_path / "saved", **given)


@pytest.mark.parametrize("way", ["load", "open"])
def test_a_function_given_again_goes_on_from_the_draws_that_were_made(tmp_path, way):
    buffer = saved(tmp_path, way)(sampler=tr.Prioritized(beta=beta))
    assert beta_of(buffer) == pytest.approx(beta(5), rel=1e-4)
    assert beta_of(buffer) == pytest.approx(beta(6), rel=1e-4)


@pytest.mark.parametrize("way", ["load", "open"])
def test_a_function_that_is_not_given_again_is_a_warning_and_its_first_value(tmp_path, way, caplog):
    bring_back = saved(tmp_path, way)
    with caplog.at_level(logging.WARNING, "torchreplay"):
        buffer = bring_back()
    assert "beta was a function, which is not saved: it stays at 0.4; give sampler=" in caplog.text
    assert beta_of(buffer) == pytest.approx(beta(0), rel=1e-4)
    caplog.clear()
    buffer.save(tmp_path / "again")
    tr.ReplayBuffer.load(tmp_path / "again")
    assert "beta was a function" in caplog.text  # still


@pytest.mark.parametrize(
    "sampler",
    [tr.Prioritized(beta=other), tr.Prioritized(alpha=0.5, beta=beta), tr.Uniform()],
    ids=["another schedule", "another alpha", "no priorities"],
)
def test_another_sampler_is_refused_for_a_file_and_taken_for_a_checkpoint(tmp_path, sampler):
    bring_back = saved(tmp_path, "open")
    with pytest.raises(ValueError, match="expected the buffer's own"):
        bring_back(sampler=sampler)
    loaded = saved(tmp_path, "load")(sampler=sampler)
    assert loaded.sampler == sampler
    if sampler.beta is other:
        assert beta_of(loaded) == pytest.approx(other(5), rel=1e-4)


@pytest.mark.parametrize("way", ["load", "open"])
@pytest.mark.parametrize(
    "sampler", [tr.Prioritized(beta=tr.LinearSchedule(0.4, 1.0, 10)), tr.Prioritized(), tr.Uniform()], ids=str
)
def test_what_is_data_needs_no_second_giving(tmp_path, way, sampler, caplog):
    with caplog.at_level(logging.WARNING, "torchreplay"):
        assert saved(tmp_path, way, sampler=sampler)().sampler == sampler
    assert not caplog.records
