"""What a buffer says once, of use that runs and most likely is a mistake; and how its errors help."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import torchreplay as tr
from torchreplay.loading.mixture import checked_errors
from torchreplay.ops import Ring

SPEC = {"obs": tr.Field((2,)), "reward": tr.Field()}


def filled(n=64, **options):
    buffer = tr.ReplayBuffer(SPEC, 1000, **options)
    if n:
        buffer.extend(obs=np.zeros((n, 2)), reward=np.arange(n))
    return buffer


def said(do):
    """The texts of the UserWarnings of what is done."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        do()
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


# TD errors that nobody heeds


def feed(buffer, times=3):
    for _ in range(times):
        buffer.update_priorities(buffer.sample(8), np.ones(8))


def test_td_errors_of_a_uniform_buffer_are_warned_of_once_with_what_to_give():
    with filled() as buffer:
        texts = said(lambda: feed(buffer))
        assert len(texts) == 1
        assert "sampler=tr.Prioritized()" in texts[0]
        assert "Uniform()" in texts[0]
        assert said(lambda: feed(buffer)) == []
        with tr.ReplayBuffer.attach(buffer.handle()) as other:  # another object, the same buffer
            assert said(lambda: feed(other)) == []
    with filled() as another:
        assert len(said(lambda: feed(another))) == 1


def test_the_warnings_name_the_users_line():
    spec = {"tokens": tr.Ragged(torch.int32)}
    with tr.ReplayBuffer(spec, 8, ragged_bytes=1 << 16) as buffer:
        buffer.extend(tokens=[[1, 2, 3]])
        with pytest.warns(match="budget|copies") as caught:
            buffer.sample(2, budget={"tokens": 2})
        assert {warning.filename for warning in caught} == {__file__}
    with filled() as buffer, pytest.warns(UserWarning, match="sampler=tr.Prioritized") as caught:
        buffer.update_priorities(buffer.sample(8), np.ones(8))
    assert caught[0].filename == __file__
    with filled(1) as buffer, pytest.warns(UserWarning, match="limiter=tr.MinSize") as caught:
        buffer.sample(8)
    assert caught[0].filename == __file__


def test_td_errors_of_a_prioritized_buffer_are_warned_of_never():
    with filled(sampler=tr.Prioritized()) as buffer:
        assert said(lambda: feed(buffer)) == []


def test_td_errors_that_are_refused_are_an_error_and_no_warning():
    with filled() as buffer:
        with pytest.raises(ValueError, match="NaN"):
            buffer.update_priorities([0], [np.nan])
        assert len(said(lambda: feed(buffer))) == 1


def test_feedback_by_a_dataset_and_by_a_mixture_is_warned_of_too():
    with filled() as buffer, filled() as first, filled(sampler=tr.Prioritized()) as second:
        dataset = tr.ReplayDataset(buffer, 8, steps=3)

        def learn(dataset):
            for batch in dataset:
                dataset.update_priorities(batch, torch.ones(8))

        assert len(said(lambda: learn(dataset))) == 1
        mixed = tr.MixedDataset({first: 0.5, second: 0.5}, 8, steps=3)
        assert len(said(lambda: learn(mixed))) == 1


# Batches of few items


def test_a_batch_of_more_than_the_items_is_warned_of_once_with_what_to_give():
    with filled(1) as buffer:
        texts = said(lambda: [buffer.sample(256) for _ in range(3)])
        assert len(texts) == 1
        assert "a batch of 256 is drawn from 1 item " in texts[0]
        assert "limiter=tr.MinSize(256)" in texts[0]
        buffer.extend(obs=np.zeros((4, 2)), reward=np.zeros(4))
        assert said(lambda: buffer.sample(256)) == []


def test_a_larger_batch_later_is_warned_of_as_well():
    with filled(8) as buffer:
        assert said(lambda: [buffer.sample(8) for _ in range(3)]) == []
        assert len(said(lambda: buffer.sample(9))) == 1


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_first_batch_of_a_dataset_is_looked_at_and_no_other(prefetch):
    with filled(3) as buffer:
        dataset = tr.ReplayDataset(buffer, 8, steps=4, prefetch=prefetch)
        texts = said(lambda: list(dataset))
        assert len(texts) == 1
        assert "a batch of 8 is drawn from 3 items" in texts[0]
    with filled(8) as buffer:
        assert said(lambda: list(tr.ReplayDataset(buffer, 8, steps=4, prefetch=prefetch))) == []


def test_items_are_counted_and_not_rows():
    spec = SPEC | {"terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}
    with tr.ReplayBuffer(spec, 100, view=tr.Transitions()) as buffer:
        flags = np.zeros(9, bool)
        buffer.extend(obs=np.zeros((10, 2)), reward=np.zeros(9), terminated=flags, truncated=flags)
        assert said(lambda: buffer.sample(9)) == []
        assert "from 9 items" in said(lambda: buffer.sample(10))[0]


# TD errors of the shape of a column


def hint_of(shape, n):
    if shape == (n, 1):
        return "td.squeeze(-1)"
    return f"values [{n}, 1] and targets [{n}] were broadcast to [{n}, {n}]: give value.squeeze(-1) - target"


@pytest.mark.parametrize("shape", [(64, 1), (64, 64)])
def test_td_errors_with_a_dimension_too_many_are_refused_with_the_way(shape):
    with filled(sampler=tr.Prioritized()) as buffer:
        batch = buffer.sample(64)
        ways = [lambda td: buffer.update_priorities(batch, td), lambda td: checked_errors("the TD errors", td, 64)]
        for way in ways:
            for make in (torch.zeros, np.zeros):
                with pytest.raises(ValueError) as caught:
                    way(make(shape))
                assert hint_of(shape, 64) in str(caught.value)
        with pytest.raises(ValueError) as caught:
            buffer.update_priorities(batch, torch.zeros(64, 3))
        assert "squeeze" not in str(caught.value)


@pytest.mark.parametrize(("shape", "way"), [((64, 1), "td.squeeze(-1)"), ((64, 64), "value.squeeze(-1) - target")])
def test_the_operator_says_the_way_as_well(shape, way):
    with filled(sampler=tr.Prioritized()) as buffer:
        ring = Ring(buffer)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            ring.update_priorities(buffer.keys(), torch.zeros(shape))
        assert way in str(caught.value)


def test_a_batch_of_one_is_no_broadcast():
    with filled(sampler=tr.Prioritized()) as buffer:
        with pytest.raises(ValueError) as caught:
            buffer.update_priorities(buffer.sample(1), torch.zeros(1, 1))
        assert "; give td.squeeze(-1)" in str(caught.value)


# Another sampler


def test_an_open_with_another_sampler_is_refused_with_what_takes_it(tmp_path):
    with filled(path=tmp_path / "ring") as old:
        old.save(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"save a checkpoint: ReplayBuffer.load\(directory, sampler=...\) takes any"):
        tr.ReplayBuffer.open(tmp_path / "ring", sampler=tr.Prioritized())
    with tr.ReplayBuffer.load(tmp_path / "saved", sampler=tr.Prioritized()) as new:
        assert new.sampler == tr.Prioritized()


# Adapters


def test_adapters_draw_as_their_libraries_do_without_a_word():
    program = """
import warnings
warnings.simplefilter("error", UserWarning)
import numpy as np
from torchreplay.compat import cpprb
buffer = cpprb.PrioritizedReplayBuffer(100, {"obs": {"shape": 2}})
buffer.add(obs=np.zeros(2))
drawn = buffer.sample(32)
buffer.update_priorities(drawn["indexes"], np.ones(32))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# Figures


def test_stats_are_printed_by_subject_each_figure_once_and_represented_as_before():
    with filled(5) as buffer:
        stats = buffer.stats()
    lines = str(stats).splitlines()
    assert len(lines) == 8
    assert max(map(len, lines)) <= 140
    no_such = {"ragged_bytes", "ragged_fill", "evicted_by_pages"} | {
        "admitted_items",
        "admission_limit",
        "open_admissions",
        "policy_version",
        "age_mean",
        "age_max",
        "expired_items",
    }
    assert not any(name in str(stats) for name in no_such)  # there are no such fields
    for name in stats.as_dict().keys() - no_such:
        assert sum(f" {name} " in f"{line.replace(',', '')} " for line in lines) == 1, name
    assert lines[0] == f"held        size 5, capacity 1,000, nbytes {stats.nbytes:,}, drawable 5"
    assert repr(stats).startswith("Stats(size=5, capacity=1000, ")
