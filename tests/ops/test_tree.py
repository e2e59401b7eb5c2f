"""PriorityTree and its operators against an array, a chi-square test and torch's own operator checks."""

import copy
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from torchreplay.priority_tree import PriorityTree

FALSE_ALARM = 1e-6  # of each statistical test; the seeds are fixed, so a passing test stays a passing one


def tree_of(priorities: torch.Tensor, seed: int = 0) -> PriorityTree:
    tree = PriorityTree(len(priorities), seed=seed)
    tree.set(torch.arange(len(priorities)), priorities)
    return tree


@pytest.mark.slow
def test_the_operators_are_there_when_the_package_is_imported():
    layout = "torch.ops.torchreplay.tree_layout(10)[0] > 0"
    again = "import importlib; importlib.reload(torchreplay)"
    program = f"import torch, torchreplay; first = {layout}; {again}; print(first and {layout})"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "True\n"
    asked_before = f"import torch; torch.ops.torchreplay; import torchreplay; print({layout})"
    assert subprocess.run([sys.executable, "-c", asked_before], capture_output=True, text=True).stdout == "True\n"
    with pytest.raises(AttributeError):
        torch.ops.torchreplay.no_such_operator  # noqa: B018


@pytest.mark.parametrize("many", [False, True])
def test_priorities_beyond_float32_are_stored_as_the_nearest_number(many):
    tree, limits = PriorityTree(3), torch.finfo(torch.float32)
    for number, stored in ((1e300, limits.max), (3.5e38, limits.max), (1e-300, limits.tiny), (1e-45, limits.tiny)):
        tree.set([1] if many else 1, [number] if many else number)
        assert tree.leaves[1] == stored
        assert tree.count > 0
        tree.set(torch.tensor(2), torch.tensor(number, dtype=torch.float64))
        assert tree.leaves[2] == stored
    for bad in (-1e-300, -1e300, math.inf, math.nan):
        with pytest.raises(ValueError, match="negative or not finite"):
            tree.set([1] if many else 1, [bad] if many else bad)
    tree.set([], [])
    assert tree.leaves[0] == 0


@given(
    capacity=st.sampled_from([1, 2, 15, 16, 17, 127, 128, 129, 1000]),
    rounds=st.lists(
        st.lists(
            st.tuples(st.integers(0, 2**30), st.one_of(st.just(0.0), st.floats(1e-6, 1e3))), min_size=1, max_size=40
        ),
        max_size=8,
    ),
)
@settings(max_examples=150, deadline=None)
def test_sums_count_minimum_and_leaves_follow_an_array_through_any_updates(capacity, rounds):
    tree, model = PriorityTree(capacity), np.zeros(capacity, np.float32)
    for updates in rounds:
        index = torch.tensor([i % capacity for i, _ in updates])
        priority = torch.tensor([p for _, p in updates], dtype=torch.float32)
        tree.set(index, priority)
        for i, p in zip(index.tolist(), priority.tolist(), strict=True):
            model[i] = p
    positive = model[model > 0]
    assert tree.get(torch.arange(capacity)).tolist() == model.tolist()
    assert tree.count == len(positive)
    assert tree.min == (positive.min() if len(positive) else math.inf)
    assert tree.total == pytest.approx(math.fsum(model.tolist()), rel=1e-12)


def test_distribution_of_draws_over_six_decades_matches_p_over_sum_at_a_million():
    # 1000 groups of 1000 neighbours. Draws are stratified, which only makes the counts more even than independent draws
    # would be: the statistic is then smaller than chi-square, never larger. A lower bound would be wrong here.
    generator = np.random.default_rng(1)
    priority = torch.from_numpy(10 ** generator.uniform(-4, 2, 1_000_000)).float()
    tree = tree_of(priority[torch.from_numpy(generator.permutation(1_000_000))], seed=2)
    share = tree.leaves.double().reshape(1000, 1000).sum(1).numpy()
    draws, n = 4000, 500
    counts = np.zeros(1000)
    for _ in range(draws):
        counts += np.bincount(tree.sample(n)[0].numpy() // 1000, minlength=1000)
    expected = share / share.sum() * draws * n
    assert ((counts - expected) ** 2 / expected).sum() < stats.chi2.isf(FALSE_ALARM, 999)


def test_distribution_of_single_draws_is_that_of_independent_draws():
    # One item a draw has one stratum, so the counts are multinomial and both tails are tested.
    priority = torch.tensor([1e-3, 0.0, 1.0, 2.0, 0.0, 0.5, 4.0, 0.01] * 5)
    tree = tree_of(priority, seed=3)
    draws = 40_000
    counts = np.zeros(len(priority))
    for _ in range(draws):
        counts[tree.sample(1)[0]] += 1
    kept = priority.numpy() > 0.1
    expected = priority.numpy()[kept].astype(float) / priority.double().sum().item() * draws
    rest, rest_expected = draws - counts[kept].sum(), draws - expected.sum()
    statistic = ((counts[kept] - expected) ** 2 / expected).sum() + (rest - rest_expected) ** 2 / rest_expected
    low, high = stats.chi2.interval(1 - FALSE_ALARM, kept.sum())
    assert low < statistic < high
    assert counts[priority.numpy() == 0].sum() == 0


def test_returned_probabilities_are_p_over_sum():
    priority = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) + 1e-3
    index, probability = tree_of(priority).sample(5000)
    expected = priority[index].double() / priority.double().sum()
    torch.testing.assert_close(
        probability.double(), expected, rtol=1e-6, atol=0
    )  # 1e-6: rounding to float32, and the grid


def test_a_draw_takes_one_index_from_each_of_n_equal_parts_of_the_sum():
    priority = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    index, _ = tree_of(priority).sample(64)
    upper = priority.double().cumsum(0)
    lower = upper - priority
    part = upper[-1] / 64
    strata = torch.arange(64)
    assert (index.diff() >= 0).all()
    assert (upper[index] >= strata * part - 1e-6).all()
    assert (lower[index] <= (strata + 1) * part + 1e-6).all()


def test_an_index_of_priority_zero_is_never_drawn_even_beside_the_largest_priorities():
    tree = PriorityTree(4096, seed=4)
    odd = torch.arange(1, 4096, 2)
    tree.set(torch.arange(4096), 3e38)
    tree.set(odd, 0.0)
    for _ in range(50):
        assert (tree.sample(1000)[0] % 2 == 0).all()


def test_the_same_seed_and_priorities_give_the_same_draws_and_torch_is_left_alone():
    priority = torch.rand(1000)
    state = torch.random.get_rng_state()
    one, two, other = tree_of(priority, 5), tree_of(priority, 5), tree_of(priority, 6)
    draws = [one.sample(32)[0] for _ in range(3)]
    assert all(torch.equal(two.sample(32)[0], draw) for draw in draws)
    assert not torch.equal(other.sample(32)[0], draws[0])
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(one.sample(32, step=1)[0], draws[1])
    assert not torch.equal(one.sample(32, stream=1, step=1)[0], draws[1])
    assert one.step == 3
    assert torch.equal(torch.random.get_rng_state(), state)


def test_find_inverts_the_running_sum():
    tree = tree_of(torch.tensor([0.0, 1.0, 0.0, 2.0, 0.5]))
    index, probability = tree.find(torch.tensor([[0.0, 0.999], [1.0, 2.999], [3.0, 3.499]]))
    assert index.tolist() == [[1, 1], [3, 3], [4, 4]]
    assert probability[2, 0] == pytest.approx(0.5 / 3.5)
    assert tree.find(math.nextafter(3.5, 0))[0].item() == 4


def test_a_priority_far_below_the_largest_counts_as_one_step_of_the_grid():
    tree = PriorityTree(100)
    tree.set(torch.tensor([0, 1]), torch.tensor([1e9, 1e-30]))
    assert tree.get(torch.tensor([0, 1])).equal(torch.tensor([1e9, 1e-30]))
    assert tree.sample(1)[0].item() == 0
    assert tree.find(1e9)[0].item() == 1
    assert tree.total == 1e9 + tree.grid_step


def test_priorities_that_are_no_normal_numbers_are_stored_as_the_smallest_of_those():
    tree = PriorityTree(100)
    tree.set(torch.tensor([0, 1]), torch.tensor([1e-45, 1e-40]))
    assert tree.leaves[:2].tolist() == [torch.finfo(torch.float32).tiny] * 2
    assert sorted(tree.sample(64)[0].unique().tolist()) == [0, 1]


@pytest.mark.parametrize("exponent", [-100, -40, -3, 50, 95])
def test_priorities_times_a_power_of_two_are_drawn_alike(exponent):
    generator = torch.Generator().manual_seed(5)
    one, other = PriorityTree(3000, seed=1), PriorityTree(3000, seed=1)
    for _ in range(60):
        index = torch.randint(3000, (200,), generator=generator)
        priority = torch.exp(3 * torch.randn(200, generator=generator))
        one.set(index, priority)
        other.set(index, priority * 2.0**exponent)
        for drawn, expected in zip(other.sample(100), one.sample(100), strict=True):
            assert torch.equal(drawn, expected)
        assert other.grid_step == one.grid_step * 2.0**exponent


def test_a_leaf_of_2_to_the_minus_36_of_the_largest_keeps_its_proportion_at_a_million():
    priority = torch.ones(1_000_000)
    priority[:1000] = 2.0**-36 * (1 + torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    tree = tree_of(priority * 1e-20)
    targets = torch.arange(2000) * tree.grid_step * 16
    index, probability = tree.find(targets)
    assert index.unique().tolist() == list(range(int(index[-1]) + 1))
    expected = priority[index].double() / priority.double().sum()
    torch.testing.assert_close(probability.double(), expected, rtol=0.02, atol=0.0)


def test_scalars_shapes_and_integer_dtypes_are_taken_as_they_come():
    tree = PriorityTree(10)
    tree.set(3, 1.5)
    tree.set(torch.tensor([[0, 1], [4, 5]], dtype=torch.int32)[:, 1], torch.tensor([2.0, 4.0], dtype=torch.bfloat16))
    assert tree.get(torch.tensor([[3, 1], [5, 0]])).tolist() == [[1.5, 2.0], [4.0, 0.0]]
    assert tree[3].item() == 1.5
    assert [leaf.item() for leaf in tree] == [0, 2, 0, 1.5, 0, 4, 0, 0, 0, 0]
    tree.set(torch.tensor([], dtype=torch.int64), torch.tensor([]))
    assert len(tree) == 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: PriorityTree(0), "capacity is 0: expected an int from 1 to 2147483648"),
        (lambda t: PriorityTree(1.5), "capacity is 1.5: expected an int from 1"),
        (lambda t: PriorityTree(1, seed=-1), "seed is -1"),
        (lambda t: t.set(10, 1.0), r"index\[0\] is 10, expected 0 to 9"),
        (lambda t: t.set(-1, 1.0), r"index\[0\] is -1"),
        (lambda t: t.set(torch.tensor([0.5]), 1.0), "index has dtype torch.float32"),
        (lambda t: t.set(torch.tensor([1, 2]), torch.ones(3)), r"shape \(3,\), expected \(2,\)"),
        (lambda t: t.set(torch.tensor([1, 2, 3]), torch.tensor([1, math.nan, math.inf])), "2 of 3 .* first at 1: nan"),
        (lambda t: t.set(1, -1.0), "1 of 1 priorities are negative"),
        (lambda t: t.set(1, True), "priority has dtype torch.bool"),
        (lambda t: t.get(10), "expected 0 to 9"),
        (lambda t: t.sample(0), "n is 0: expected an int from 1 to"),
        (lambda t: t.sample(1, stream=2**48), "stream is 281474976710656"),
        (lambda t: t.sample(1, step=-1), "step is -1"),
        (lambda t: t.find(1.0), r"1 of 1 targets lie outside \[0, 1.0\), the first is 1.0"),
        (lambda t: t.find(torch.tensor([0.5, math.nan])), "the first is nan"),
        (lambda t: PriorityTree(10).sample(1), "no positive priority"),
        (lambda t: t.load_state_dict({"leaves": torch.ones(10)}), "no seed, step"),
        (
            lambda t: t.load_state_dict({"leaves": torch.ones(9), "seed": 0, "step": 0}),
            r"shape \(9,\), expected \(10,\)",
        ),
        (lambda t: t.load_state_dict({"leaves": -torch.ones(10), "seed": 0, "step": 0}), "negative or not finite"),
        (
            lambda t: t.load_state_dict({"leaves": torch.ones(10), "grid": torch.ones(3), "seed": 0, "step": 0}),
            r"grid of torch.float32 \(3,\), expected int64 \(2,\)",
        ),
    ],
)
def test_bad_input_is_a_value_error_that_says_what_was_given_and_expected_and_changes_nothing(call, message):
    tree = PriorityTree(10, seed=1)
    tree.set(2, 1.0)
    before = tree.memory.clone()
    with pytest.raises(ValueError, match=message):
        call(tree)
    assert torch.equal(tree.memory, before)
    assert tree.step == 0


def test_state_pickle_and_copy_carry_priorities_and_the_next_draw():
    tree = tree_of(torch.rand(500), seed=7)
    tree.sample(8)
    loaded = PriorityTree(500)
    loaded.load_state_dict(tree.state_dict())
    copies = [loaded, pickle.loads(pickle.dumps(tree)), copy.deepcopy(tree)]
    expected = tree.sample(64)[0]
    assert all(torch.equal(other.sample(64)[0], expected) for other in copies)
    copies[2].set(0, 5.0)
    assert tree[0] != 5.0


def test_a_state_carries_the_grid_that_draws_were_made_in_and_one_without_gets_that_which_fits():
    tree = tree_of(torch.cat([torch.ones(250), torch.full((250,), 1e-6)]), seed=7)
    tree.set(torch.arange(250), 1e-6)
    loaded, fitted = PriorityTree(500), PriorityTree(500)
    loaded.load_state_dict(tree.state_dict())
    assert torch.equal(loaded.memory, tree.memory)
    fitted.load_state_dict({name: value for name, value in tree.state_dict().items() if name != "grid"})
    assert fitted.grid_step < tree.grid_step
    tree.rebuild()
    assert torch.equal(fitted.leaves, tree.leaves)
    assert fitted.grid_step == tree.grid_step


def test_rebuild_takes_over_leaves_that_were_written_directly():
    tree = PriorityTree(1000)
    tree.leaves.copy_(torch.arange(1000))
    tree.leaves[7] = math.nan
    tree.rebuild()
    assert tree.total == sum(range(1000)) - 7
    assert (tree.count, tree.min) == (998, 1.0)


def test_repr_names_capacity_count_total_and_minimum():
    assert repr(tree_of(torch.tensor([0, 0.5, 2]))) == "PriorityTree(capacity=3, count=2, total=2.5, min=0.5)"


@pytest.fixture
def memory():
    import torchreplay.ops  # noqa: F401

    ops = torch.ops.torchreplay
    memory = torch.zeros(ops.tree_layout(100)[0], dtype=torch.uint8)
    ops.tree_set(memory, 100, torch.arange(100), torch.ones(100))
    return memory


CALLS = {
    "tree_set": (torch.tensor([1, 2]), torch.tensor([0.5, 2.0])),
    "tree_get": (torch.tensor([1, 2]),),
    "tree_find": (torch.tensor([0, 5]),),
    "tree_sample": (16, 1, 2, 3),
    "tree_rebuild": (),
    "tree_restore": (torch.tensor([128, 3]),),
    "tree_grid": (),
    "tree_unit": (),
    "tree_total": (),
    "tree_count": (),
    "tree_min": (),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_passes_the_checks_of_torch_library(name, memory):
    torch.library.opcheck(getattr(torch.ops.torchreplay, name).default, (memory, 100, *CALLS[name]))


def test_operators_compile_into_one_graph_without_breaks(memory):
    def update(memory: torch.Tensor, td: torch.Tensor) -> torch.Tensor:
        index, probability = torch.ops.torchreplay.tree_sample(memory, 100, 8, 0, 0, 0)
        torch.ops.torchreplay.tree_set(memory, 100, index, td.abs() + 1e-6)
        return probability * torch.ops.torchreplay.tree_min(memory, 100)

    td = torch.linspace(-1, 1, 8)
    expected_memory = memory.clone()
    expected = update(expected_memory, td)
    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(memory, td), expected)
    assert torch.equal(memory, expected_memory)


def test_compiled_draws_of_other_numbers_and_sizes_need_no_other_compilation(memory):
    torch._dynamo.reset()
    sample = torch.ops.torchreplay.tree_sample
    compiled = torch.compile(lambda n, step: sample(memory, 100, n, 1, 0, step), fullgraph=True, backend="aot_eager")
    for step in range(20):  # more than torch.compile's limit of recompilations
        for drawn, expected in zip(compiled(8 + step, step), sample(memory, 100, 8 + step, 1, 0, step), strict=True):
            assert torch.equal(drawn, expected)


def test_a_compiled_tree_draws_anew_with_each_call():
    torch._dynamo.reset()
    tree, plain = (PriorityTree(100, seed=1) for _ in range(2))
    for one in (tree, plain):
        one.set(torch.arange(100), torch.linspace(1, 2, 100))
    compiled = torch.compile(lambda: tree.sample(8)[0], fullgraph=True, backend="aot_eager")
    for _ in range(20):
        assert torch.equal(compiled(), plain.sample(8)[0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m[:-1], "bytes, a tree of capacity 100 has"),
        (lambda m: m.float(), "memory is Float, expected Byte"),
        (lambda m: m.reshape(2, -1), "memory has 2 dimensions"),
        (lambda m: torch.cat([m, m])[::2], "memory is not contiguous"),
        (lambda m: torch.cat([m, m])[8 : 8 + len(m)], "aligned to 64 bytes"),
    ],
)
def test_an_operator_refuses_memory_that_is_not_a_trees(spoil, message, memory):
    with pytest.raises(ValueError, match=message):
        torch.ops.torchreplay.tree_min(spoil(memory), 100)


@pytest.mark.slow
def test_the_portable_twin_gives_the_same_draws_and_bytes_as_the_fastest_instructions():
    program = (
        "import hashlib, torch; from torchreplay.priority_tree import PriorityTree; t = PriorityTree(5000, seed=1);"
        "g = torch.Generator().manual_seed(0);"
        "[t.set(torch.randint(5000, (300,), generator=g), torch.rand(300, generator=g) * 10.0**(k % 9 * 8 - 32))"
        " for k in range(30)];"
        "print(hashlib.sha256(t.memory.numpy().tobytes() + t.sample(999)[0].numpy().tobytes()).hexdigest())"
    )
    digests = {
        subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True, text=True).stdout
        for env in ({}, {"TORCHREPLAY_SIMD": "portable"})
    }
    assert len(digests) == 1
