"""LaBER against the formulas of Lahire et al. (2022) in loops of their own, and draws against their probabilities."""

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats

import torchreplay as tr

SPEC = {"x": tr.Field((2,)), "deep": {"n": tr.Field((), torch.int64)}}
FALSE_ALARM = 1e-6  # of each statistical test


def filled(sampler=None, rows=200, seed=0):
    buffer = tr.ReplayBuffer(SPEC, rows, sampler=sampler, seed=seed)
    n = np.arange(rows)
    buffer.extend(x=np.stack([n, -n], 1).astype(np.float32), deep={"n": n}, priority=n + 1.0)
    return buffer


@pytest.fixture
def large():
    return filled().sample(40)


def rows_of(batch):
    return batch["deep"]["n"].tolist()


def by_hand(large, priority, small, mode, eps):
    """The weights of `small`, item by item."""
    p = [abs(float(q)) + eps for q in priority]
    total = sum(p)
    of_row = dict(zip(rows_of(large), zip(p, large["weight"].tolist(), strict=True), strict=False))
    weights = []
    for row in rows_of(small):
        p_j, own = of_row[row]
        probability = p_j / total
        weights.append(own / probability / (1 if mode == "lazy" else len(p)))
    if mode == "max":
        weights = [weight / max(weights) for weight in weights]
    return weights


@pytest.mark.parametrize("mode", ["mean", "max", "lazy"])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("sampler", [tr.Uniform(), tr.Prioritized()], ids=["uniform", "prioritized"])
def test_weights_are_those_of_the_formula_times_the_large_batchs_own(mode, eps, sampler):
    large = filled(sampler).sample(64)
    priority = torch.tensor([(row % 7) / 3 for row in rows_of(large)])  # a function of the row, zeros among them
    small = tr.LaBER(16, mode, seed=1, eps=eps)(large, priority)
    assert small["weight"].dtype == torch.float32
    assert small["weight"].tolist() == pytest.approx(by_hand(large, priority, small, mode, eps), rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_items_come_whole_with_the_keys_and_probabilities_of_their_draw(large, seed):
    where = {row: i for i, row in enumerate(rows_of(large))}
    small = tr.LaBER(16, seed=seed)(large, torch.rand(40, generator=torch.Generator().manual_seed(seed)))
    assert type(small) is tr.ReplayBatch
    assert list(small) == list(large)
    assert small.batch_size == 16
    for i, row in enumerate(rows_of(small)):
        j = where[row]
        assert small["x"][i].tolist() == large["x"][j].tolist() == [row, -row]
        assert small["key"][i] == large["key"][j]
        assert small["probability"][i] == large["probability"][j]


def test_an_item_is_taken_in_proportion_to_its_priority(large):
    # A chi-square test of 40,000 independent draws.
    priority = torch.arange(40.0) + 1
    position = {key: i for i, key in enumerate(large["key"].tolist())}
    distinct = len(position) == 40
    assert distinct, "the fixture's stratified draw repeats no row"
    laber = tr.LaBER(40, seed=5)
    counts = np.zeros(40)
    for _ in range(1000):
        for key in laber(large, priority)["key"].tolist():
            counts[position[key]] += 1
    expected = (priority / priority.sum()).numpy().astype(np.float64)
    assert stats.chisquare(counts, expected / expected.sum() * counts.sum()).pvalue > FALSE_ALARM


def test_the_weighted_mean_is_an_unbiased_estimate_of_the_large_batchs_mean(large):
    # The mean of 20,000 independent terms lies within z standard errors of its expectation.
    priority = torch.rand(40, generator=torch.Generator().manual_seed(2)) + 0.1
    laber = tr.LaBER(40, seed=3)
    terms = torch.cat([(s := laber(large, priority))["weight"] * s["x"][:, 0] for _ in range(500)]).double()
    error = terms.std() / len(terms) ** 0.5
    z = stats.norm.isf(FALSE_ALARM / 2)
    assert abs(terms.mean() - large["x"][:, 0].double().mean()) < z * error


def test_the_sign_of_a_priority_does_not_matter(large):
    td = torch.linspace(-3, 3, 40)
    one, other = (tr.LaBER(16, seed=1)(large, p) for p in (td, td.abs()))
    assert torch.equal(one["key"], other["key"])
    assert torch.equal(one["weight"], other["weight"])


def test_all_zero_priorities_are_drawn_uniformly_with_weight_one(large):
    small = tr.LaBER(16, seed=1)(large, torch.zeros(40))
    assert small["weight"].tolist() == pytest.approx([1.0] * 16)
    assert len(set(small["key"].tolist())) > 1


def test_weights_of_zero_stay_zero(large):
    large["weight"].zero_()
    assert tr.LaBER(16, "max", seed=1)(large, torch.ones(40))["weight"].tolist() == [0.0] * 16


def test_priorities_may_be_of_any_dtype_numpys_and_part_of_a_graph(large):
    values = torch.arange(40) % 5
    reference = tr.LaBER(16, seed=1)(large, values)
    given = [values.half(), values.bfloat16(), values.double().requires_grad_(), values.numpy(), values.tolist()]
    for priority in given:
        small = tr.LaBER(16, seed=1)(large, priority)
        assert torch.equal(small["key"], reference["key"])
        assert not small["weight"].requires_grad


def test_feedback_reaches_the_rows_that_were_taken():
    buffer = filled(tr.Prioritized())
    small = tr.LaBER(8, seed=0)(buffer.sample(32), torch.rand(32))
    buffer.update_priorities(small, torch.ones(8))
    assert buffer.stats().updated == 8
    with pytest.raises(ValueError, match="another buffer"):
        filled(seed=1).update_priorities(small, torch.ones(8))


def test_the_same_seed_takes_the_same_items_and_the_global_generators_are_left_alone(large):
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    priority = torch.linspace(0, 1, 40)
    one, other = tr.LaBER(16, seed=9), tr.LaBER(16, seed=9)
    for _ in range(3):
        assert torch.equal(one(large, priority)["key"], other(large, priority)["key"])
    draws = [tr.LaBER(16)(large, priority)["key"].tolist() for _ in range(4)]
    assert any(draw != draws[0] for draw in draws), "without a seed each draws its own"
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpys)  # noqa: NPY002


def test_the_generators_state_can_be_saved_and_restored(large):
    priority = torch.linspace(0, 1, 40)
    laber = tr.LaBER(16, seed=9)
    laber(large, priority)
    state = laber.generator.get_state()
    expected = laber(large, priority)
    resumed = tr.LaBER(16)
    resumed.generator.set_state(state)
    assert torch.equal(resumed(large, priority)["key"], expected["key"])


def test_the_large_batch_stays_as_it_is(large):
    kept = copy.deepcopy(large)
    small = tr.LaBER(16, seed=0)(large, torch.rand(40))
    small["x"].zero_()
    small["weight"].zero_()
    small["key"].zero_()
    assert torch.equal(large["x"], kept["x"])
    assert torch.equal(large["weight"], kept["weight"])
    assert torch.equal(large["key"], kept["key"])


@pytest.mark.parametrize("mode", ["mean", "max", "lazy"])
def test_priorities_whose_sum_is_beyond_float64_weigh_as_others_in_proportion(large, mode):
    priority = (torch.arange(40.0, dtype=torch.float64) + 1) * 2.0**-6
    one, other = (tr.LaBER(16, mode, seed=1, eps=1e-300)(large, p) for p in (priority, priority * 2.0**1023))
    assert other["weight"].isfinite().all()
    assert torch.equal(one["key"], other["key"])
    assert torch.equal(one["weight"], other["weight"])


class Pair(NamedTuple):
    one: Any
    other: Any


def test_entries_of_any_kind_are_taken_with_their_items(large):
    rows = torch.tensor(rows_of(large))
    given = {
        "array": rows.numpy(),
        "list": rows.tolist(),
        "texts": tuple(map(str, rows.tolist())),
        "dicts": [{"row": row} for row in rows.tolist()],
        "scalars": list(rows),
        "ragged": [np.full(40 + i, row) for i, row in enumerate(rows.tolist())],
        "pair": Pair(rows, [rows.numpy(), {"deep": rows}]),
    }
    small = tr.LaBER(16, seed=0)(large | given, torch.rand(40))
    taken = rows_of(small)
    array, pair = small["array"], small["pair"]
    assert array.tolist() == small["list"] == [int(row) for row in small["texts"]] == taken
    assert [entry["row"] for entry in small["dicts"]] == [int(row) for row in small["scalars"]] == taken
    assert [entry[-1] for entry in small["ragged"]] == taken
    assert type(pair) is Pair
    assert pair.one.tolist() == pair.other[0].tolist() == pair.other[1]["deep"].tolist() == taken
    assert [type(small[name]) for name in ("array", "list", "texts")] == [np.ndarray, list, tuple]
    array[:] = -1
    assert rows.min() >= 0, "they have memory of their own"


@pytest.mark.parametrize(
    ("entry", "name", "told"),
    [
        (torch.tensor(1.0), "mine", r"of shape \[\]"),
        (np.array(1.0), "mine", r"of shape \[\]"),
        (torch.ones(39, 2), "mine", r"of shape \[39, 2\]"),
        (np.ones(41), "mine", r"of shape \[41\]"),
        ([1, 2, 3], "mine", r"\[1, 2, 3\]"),
        ([], "mine", r"\[\]"),
        ("text", "mine", "'text'"),
        (None, "mine", "None"),
        ({"deep": (torch.ones(40), torch.ones(7))}, "mine/deep/1", r"of shape \[7\]"),
    ],
    ids=repr,
)
def test_an_entry_without_a_part_for_each_item_is_refused_by_its_name(large, entry, name, told):
    text = f"entry '{name}' of the large batch is {told}: expected one part for each of the 40 items"
    with pytest.raises(ValueError, match=text):
        tr.LaBER(16)(large | {"mine": entry}, torch.ones(40))


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        (torch.ones(39), r"the priorities have shape \[39\]: expected \[40\]"),
        (torch.ones(40, 1), r"the priorities have shape \[40, 1\]: expected \[40\]"),
        (torch.ones(()), r"the priorities have shape \[\]"),
        (
            torch.tensor([1.0] * 7 + [float("nan")] * 33),
            "33 of 40 priorities are .*, the first at index 7",
        ),
        (torch.tensor([1.0] * 39 + [-float("inf")]), "1 of 40 priorities are NaN or infinite, the first at index 39"),
    ],
    ids=str,
)
def test_bad_priorities_are_refused(large, priority, message):
    with pytest.raises(ValueError, match=message):
        tr.LaBER(16)(large, priority)


def test_a_large_batch_smaller_than_the_small_one_is_refused(large):
    with pytest.raises(ValueError, match="the large batch has 40 items: expected at least 41"):
        tr.LaBER(41)(large, torch.ones(40))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": 4, "mode": "median"}, "mode is 'median': expected one of 'mean', 'max', 'lazy'"),
        ({"batch_size": 4, "eps": -1e-6}, "eps is -1e-06"),
        ({"batch_size": 4, "eps": float("inf")}, "eps is inf"),
        ({"batch_size": 4, "seed": -1}, "seed is -1"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tr.LaBER(**arguments)


def test_repr_tells_the_settings():
    assert repr(tr.LaBER(16, "max")) == "LaBER(16, mode='max', eps=1e-06)"


@pytest.mark.gpu
def test_a_batch_on_the_gpu_stays_there_and_its_keys_on_the_cpu():
    buffer = filled(tr.Prioritized())
    large = buffer.sample(64)
    priority = torch.rand(64)
    expected = tr.LaBER(16, seed=1)(large, priority)
    for given in (priority, priority.cuda()):
        small = tr.LaBER(16, seed=1)(large.to("cuda"), given)
        devices = [small[name].device.type for name in ("x", "weight", "probability", "key")]
        assert devices == ["cuda", "cuda", "cuda", "cpu"]
        assert torch.equal(small["x"].cpu(), expected["x"])
        assert torch.equal(small["key"], expected["key"])
        buffer.update_priorities(small, small["x"].sum(1))


def test_a_plain_mapping_is_a_batch_whose_weights_are_1():
    large = {"obs": np.arange(12).reshape(6, 2), "nested": {"reward": torch.arange(6.0)}}
    batch = tr.LaBER(4, "lazy", seed=0)(large, [0, 0, 3, 1, 0, 0])
    assert set(batch["nested"]["reward"].tolist()) <= {2.0, 3.0}
    for weight, reward in zip(batch["weight"].tolist(), batch["nested"]["reward"].tolist(), strict=True):
        assert weight == pytest.approx(4 / 3 if reward == 2 else 4, rel=1e-4)
    assert (batch["obs"][:, 0] == 2 * batch["nested"]["reward"].numpy()).all()


def test_an_entry_without_parts_leaves_it_to_the_others_how_many_items_there_are():
    batch = tr.LaBER(2, seed=0)({"infos": {}, "i": torch.arange(3)}, [0.0, 1.0, 0.0])
    assert batch["i"].tolist() == [1, 1]
    assert batch["infos"] == {}


def test_without_eps_items_of_priority_0_are_never_taken():
    batch = tr.LaBER(64, eps=0, seed=0)({"i": torch.arange(64)}, [1.0] + [0.0] * 63)
    assert batch["i"].tolist() == [0] * 64
    with pytest.raises(ValueError, match="all priorities are 0"):
        tr.LaBER(2, eps=0)({"i": torch.arange(3)}, [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="no entry with a part for each item"):
        tr.LaBER(2)({"i": 3}, [0.0, 1.0, 0.0])
