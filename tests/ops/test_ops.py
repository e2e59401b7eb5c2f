"""The ring's operators against the buffer itself, published formulas, torch's operator checks and its compiler."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from forked import Forked, shared_counters
from numbered_rings import BETA, OPS, ROWS, filled_buffer, outputs, write
from paths import import_path

import torchreplay as tr
from torchreplay.ops import Ring
from torchreplay.schema.spec import ELEMENTS


@pytest.fixture
def buffer():
    with filled_buffer() as buffer:
        yield buffer


@pytest.fixture
def ring(buffer):
    ring = Ring(buffer)
    yield ring
    ring.close()


def leaves():
    return ((torch.arange(ROWS) % 10 + 0.5).double() + 1e-6) ** 0.6


def test_a_batch_holds_the_rows_that_were_written_under_its_keys(ring):
    batch = ring.sample(64)
    assert batch.keys() == {"obs", "number", "done", "key", "weight", "probability"}
    assert torch.equal(batch["number"], batch["key"])
    assert torch.equal(batch["obs"]["position"], batch["key"].float()[:, None].expand(64, 3))
    assert torch.equal(batch["done"], batch["key"] % 2 == 0)
    assert batch["key"].min() >= 0
    assert batch["key"].max() < ROWS


def test_a_row_of_every_dtype_comes_back_as_it_was_written():
    names = [str(dtype).removeprefix("torch.") for dtype in ELEMENTS]
    with tr.ReplayBuffer(dict(zip(names, [tr.Field((2,), d) for d in ELEMENTS], strict=True)), 4) as buffer:
        row = {name: torch.tensor([[0, 1]]).to(dtype) for name, dtype in zip(names, ELEMENTS, strict=True)}
        buffer.extend(**row)
        batch = Ring(buffer).sample(1)
        assert all(torch.equal(batch[name], value) and batch[name].dtype == value.dtype for name, value in row.items())


def test_probability_and_weight_follow_the_formulas_of_prioritized_replay(buffer, ring):
    p = leaves()
    for beta in (None, 1.0, torch.tensor(0.7)):
        batch = ring.sample(32, beta)
        probability = p / p.sum()
        exponent = 0.4 if beta is None else float(beta)
        weight = (ROWS * probability) ** -exponent / ((ROWS * probability) ** -exponent).max()
        torch.testing.assert_close(batch["probability"].double(), probability[batch["key"]], rtol=1e-5, atol=0)
        torch.testing.assert_close(batch["weight"].double(), weight[batch["key"]], rtol=1e-5, atol=0)


def test_a_ring_set_to_the_stream_of_the_buffer_draws_the_batches_of_the_buffer(buffer, ring):
    ring.state[2] = 0
    for _ in range(3):
        theirs, ours = buffer.sample(16), ring.sample(16)
        assert all(torch.equal(ours[name], theirs[name]) for name in ("key", "number", "weight", "probability"))
    assert ring.state[3] == 3


def test_rings_draw_from_streams_of_their_own_and_leave_the_global_generator_alone(buffer, ring):
    generator = torch.get_rng_state()
    other = Ring(buffer)
    ours, theirs = ring.sample(32)["key"], other.sample(32)["key"]
    assert not torch.equal(ours, theirs)
    ring.state[3] = 0
    assert torch.equal(ring.sample(32)["key"], ours)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32], ids=str
)
def test_td_errors_of_any_real_dtype_and_stride_reach_exactly_their_items(buffer, ring, dtype):
    key = torch.tensor([3, 50, 99])
    ring.update_priorities(key, torch.tensor([[-4, 0], [2, 0], [8, 0]], dtype=dtype)[:, 0])
    expected = leaves()
    expected[key] = (torch.tensor([4.0, 2.0, 8.0]).double() + 1e-6) ** 0.6
    batch = buffer.sample(64)
    torch.testing.assert_close(
        batch["probability"].double(), expected[batch["key"]] / expected.sum(), rtol=1e-5, atol=0
    )
    assert buffer.stats().updated == 3


def test_td_errors_of_overwritten_rows_are_dropped_and_counted():
    with filled_buffer(capacity=50) as buffer:
        Ring(buffer).update_priorities(torch.tensor([10, 60]), torch.tensor([9.0, 9.0]))
        assert (buffer.stats().updated, buffer.stats().stale_updates) == (1, 1)


def test_size_is_the_number_of_rows_held(buffer, ring):
    assert ring.size().item() == len(buffer) == ROWS
    write(buffer, 50)
    assert ring.size().item() == len(buffer) == 128


def test_a_draw_that_would_have_to_wait_says_so_with_the_numbers_and_can_be_made_later():
    with filled_buffer(rows=0, limiter=tr.MinSize(3)) as buffer:
        ring = Ring(buffer)
        with pytest.raises(RuntimeError, match=r"0 items were inserted, 3 are needed .* call buffer.sample\(\) first"):
            ring.sample(4)
        assert ring.state[3] == 0
        write(buffer, 3)
        assert ring.sample(4)["key"].max() < 3
        buffer.stop()
        with pytest.raises(RuntimeError, match="the replay buffer was stopped"):
            ring.sample(4)


def test_the_rings_of_a_process_are_one_learner_until_the_last_is_closed_or_garbage(buffer):
    first, second = Ring(buffer), Ring(buffer)
    assert buffer.stats().learners == 0
    first.sample(1), second.sample(1)
    assert buffer.stats().learners == 1
    first.close(), first.close()
    assert second.sample(1)["key"].shape == (1,)
    second.close()
    assert buffer.stats().learners == 0
    with pytest.raises(ValueError, match=r"make one here with torchreplay\.ops\.Ring"):
        second.sample(1)
    third = Ring(buffer)
    third.sample(1)
    del third
    gc.collect()
    assert buffer.stats().learners == 0


def test_a_ring_outlives_the_buffer_object_it_was_made_of():
    buffer = filled_buffer()
    ring = Ring(buffer)
    buffer.close()
    assert torch.equal((batch := ring.sample(16))["number"], batch["key"])
    with pytest.raises(RuntimeError, match="closed"):
        Ring(buffer)
    with pytest.raises(TypeError, match=r"buffer is 3: expected torchreplay\.ReplayBuffer"):
        Ring(3)


def test_a_forked_child_draws_from_another_stream_and_is_another_learner(buffer, ring):
    drawn = shared_counters(33)
    parent = ring.sample(32)["key"]

    def child():
        ring.state[3] = 0
        for i, key in enumerate(ring.sample(32)["key"].tolist()):
            drawn[i] = key
        drawn[32] = buffer.stats().learners

    with Forked(child) as process:
        assert process.wait() == 0
    assert sorted(drawn[:32].tolist()) != sorted(parent.tolist())
    assert 0 <= min(drawn[:32]) <= max(drawn[:32]) < ROWS
    assert drawn[32] == 2
    assert buffer.stats().learners == 1


def test_the_operators_pass_the_checks_of_torch_library(ring):
    torch.library.opcheck(OPS.ring_sample.default, (ring.state, BETA, *outputs()))
    torch.library.opcheck(OPS.ring_update_priorities.default, (ring.state, torch.arange(4), torch.ones(4)))
    torch.library.opcheck(OPS.ring_size.default, (ring.state,))


def train_step(ring, weights, beta):
    """Draws, computes a loss, feeds back and draws again: the second batch depends on the feedback of the first."""
    batch = ring.sample(16, beta)
    td = batch["obs"]["position"] @ weights - batch["number"]
    loss = (batch["weight"] * td.square()).mean()
    ring.update_priorities(batch["key"], td)
    second = ring.sample(16, beta)
    return loss, batch["key"], second["key"], second["probability"]


def check_compiled_step_does_what_the_plain_step_does(backend):
    torch._dynamo.reset()
    compiled = torch.compile(train_step, fullgraph=True, backend=backend)
    with filled_buffer() as ours, filled_buffer() as theirs:
        ring, plain = Ring(ours), Ring(theirs)
        for i in range(12):  # more than torch.compile's limit of recompilations: beta is annealed
            weights = torch.linspace(0.1, 0.4, 3) * (i + 1)
            for got, expected in zip(
                compiled(ring, weights, 0.4 + 0.05 * i), train_step(plain, weights, 0.4 + 0.05 * i), strict=True
            ):
                torch.testing.assert_close(got, expected)
        assert torch.equal(ring.state[2:], plain.state[2:])
        assert ours.stats().updated == theirs.stats().updated == 12 * 16


def test_a_compiled_step_without_graph_breaks_does_what_the_plain_step_does():
    check_compiled_step_does_what_the_plain_step_does("aot_eager")


@pytest.mark.slow
def test_a_step_compiled_to_native_code_does_what_the_plain_step_does():
    # In a process of its own: the compiler leaves threads behind.
    program = "import test_ops; test_ops.check_compiled_step_does_what_the_plain_step_does('inductor')"
    arguments = [sys.executable, "-W", "ignore", "-c", program]
    env = {**os.environ, "PYTHONPATH": import_path()}
    result = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=170)
    assert result.returncode == 0, result.stderr


def test_compiled_draws_of_any_size_need_no_other_compilation(buffer, ring):
    torch._dynamo.reset()
    compiled = torch.compile(lambda n: ring.sample(n)["key"], fullgraph=True, backend="aot_eager")
    assert [len(compiled(4 + i)) for i in range(20)] == list(range(4, 24))
    assert buffer.stats().draws == 20


def test_a_compiled_function_keeps_draws_whose_batches_it_ignores_and_merges_none(buffer, ring):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def three_draws():
        first = ring.sample(32)
        ring.sample(32)
        return first["key"], ring.sample(32)["key"]

    first, third = three_draws()
    assert buffer.stats().draws == 3
    ring.state[3] = 0
    assert torch.equal(ring.sample(32)["key"], first)
    ring.state[3] = 2
    assert torch.equal(ring.sample(32)["key"], third)


def test_repr_names_fields_stream_and_draws_made(ring):
    ring.sample(4)
    assert repr(ring) == f"Ring(fields: obs/position, number, done, process {os.getpid()}, stream 1, 1 draws made)"
    ring.close()
    assert repr(ring).endswith("1 draws made, closed)")


def linked_buffer(view, **arguments):
    spec = {"obs": tr.Field((2,)), "fade": tr.Field(), "reward": tr.Field(), "terminated": tr.Field((), torch.bool)}
    buffer = tr.ReplayBuffer(spec | {"truncated": tr.Field((), torch.bool)}, 64, view=view, seed=3, **arguments)
    steps = np.arange(10, dtype=np.float32)
    ends = steps == 9
    values = {"obs": np.arange(22).reshape(11, 2), "fade": 1 / (2 + steps), "reward": steps, "terminated": ends}
    buffer.extend(**values, truncated=np.zeros(10, bool))
    return buffer


@pytest.mark.parametrize(
    "view",
    [
        tr.Transitions(n_step=3, gamma=0.5, stack={"obs": 2}),
        tr.Transitions(n_step=3, gamma=0.5, discount="fade"),
        tr.Sequences(4, stride=2),
        tr.Sequences(2, burn_in=1),
    ],
)
def test_a_ring_draws_the_items_that_gather_finds_under_their_keys(view):
    buffer = linked_buffer(view)
    batch = Ring(buffer).sample(16)
    same = buffer.gather(batch["key"])
    assert batch.keys() == same.keys()
    for name in batch.keys() - {"weight", "probability"}:
        assert torch.equal(batch[name], same[name]), name


def goal_buffer():
    view = tr.Hindsight(
        lambda achieved, desired: desired[:, 0], achieved="obs", desired="goal", share=1.0, observation=("obs", "goal")
    )
    spec = {"obs": tr.Field((1,)), "goal": tr.Field((1,)), "reward": tr.Field(), "terminated": tr.Field((), torch.bool)}
    buffer = tr.ReplayBuffer(spec | {"truncated": tr.Field((), torch.bool)}, 64, view=view)
    flags = np.zeros(3, bool)
    buffer.extend(
        obs=np.arange(4)[:, None],
        goal=np.full((4, 1), 9),
        reward=np.zeros(3),
        terminated=flags,
        truncated=np.array([False, False, True]),
    )
    return buffer


def test_a_ring_relabels_goals_as_the_view_says():
    batch = Ring(goal_buffer()).sample(32)
    assert batch["relabelled"].all()
    assert torch.equal(batch["reward"], batch["next_goal"][:, 0])
    assert torch.equal(batch["goal"], batch["next_goal"])
    assert (batch["goal"] > batch["obs"]).all()
    assert (batch["goal"] <= 3).all()


def test_a_compiled_draw_relabels_goals_in_one_graph():
    ring = Ring(goal_buffer())
    compiled = torch.compile(ring.sample, fullgraph=True, backend="aot_eager")
    for n in (8, 16, 24):
        batch = compiled(n)
        assert batch["relabelled"].all()
        assert torch.equal(batch["reward"], batch["next_goal"][:, 0])
