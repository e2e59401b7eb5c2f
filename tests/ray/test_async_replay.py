"""A learner's loop between explorers, evaluator and buffers: what it draws, feeds back, publishes and counts."""

import time
from types import SimpleNamespace

import pytest
import torch
from forked import eventually
from numbered_rows import make_buffer, row
from scripted_workers import RAISED, ScriptedActors

import torchreplay as tr
from torchreplay.ray import AsyncReplay, Evaluator, ExplorerPool, ExplorersFailed
from torchreplay.ray.training.throughput import Throughput
from torchreplay.ray.workers.resources import WorkerResources

ROWS = 64


@pytest.fixture
def actors(monkeypatch):
    """In place of processes: explorers that run and do nothing."""
    actors = ScriptedActors(lambda launch: None)
    monkeypatch.setattr(WorkerResources, "open", lambda *_: actors)
    return actors


def filled(alpha=1.0):
    spec = {"number": tr.Field((), torch.int64)}
    buffer = tr.ReplayBuffer(spec, ROWS, sampler=tr.Prioritized(alpha=alpha), seed=0)
    buffer.extend(number=torch.arange(ROWS))
    return buffer


def policy(number=0.0):
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, number)
    return module


def test_every_step_learns_from_a_batch_and_feeds_its_errors_back(actors):
    buffer, drawn = filled(), []

    def learn(batch):
        drawn.append(batch["number"].tolist())
        return 1.0 + batch["number"]

    stats = AsyncReplay(ExplorerPool(print, 2, buffer), learn, batch_size=8, prefetch=0).run(50)
    assert (stats.steps, stats.items, len(drawn)) == (50, 400, 50)
    assert stats.buffers["buffer"].sampled == stats.buffers["buffer"].updated == 400
    fed = {number for batch in drawn for number in batch}
    expected = torch.tensor([1.0 + n if n in fed else 1.0 for n in range(ROWS)], dtype=torch.float64)
    batch = buffer.sample(512)
    share = (expected / expected.sum())[batch["number"]]
    torch.testing.assert_close(batch["probability"].double(), share, rtol=1e-4, atol=0)
    assert {part: timing.count for part, timing in stats.timings.items()} == {
        "draw": 50,
        "learn": 50,
        "feedback": 50,
        "publish": 0,
    }
    assert all(timing.mean_ms >= 0 and timing.seconds >= 0 for timing in stats.timings.values())
    assert [explorer.index for explorer in stats.explorers] == [0, 1]
    assert stats.as_dict()["buffers"]["buffer"]["size"] == ROWS


@pytest.mark.parametrize("names", [None, ["red", "blue"]])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_is_drawn_before_the_learner_asks_is_told(actors, names, prefetch):
    buffers = filled() if names is None else {name: filled() for name in names}
    replay = AsyncReplay(ExplorerPool(print, 1, buffers), lambda _: None, batch_size=8, prefetch=prefetch)
    with replay:
        for step in replay.steps(5):
            if prefetch:  # a learner that is slower than draws
                eventually(lambda: replay.dataset.ready == prefetch)
            assert replay.stats().ready == pytest.approx(prefetch * (step - 1) / step)  # the first one found nothing
    assert replay.dataset.ready == 0


def test_batches_go_where_the_learner_wants_them(actors):
    devices = []
    pool = ExplorerPool(print, 1, filled())
    AsyncReplay(pool, lambda batch: devices.append(batch["number"].device.type), device="meta").run(2)
    assert devices == ["meta"] * 2
    with pytest.raises(ValueError, match=r"pin is 'ring'.* device is None"):
        AsyncReplay(pool, print, pin="ring")


def test_without_errors_nothing_is_fed_back(actors):
    buffer = filled()
    AsyncReplay(ExplorerPool(print, 1, buffer), lambda batch: None).run(3)
    assert buffer.stats().updated == 0


def test_weights_are_published_every_so_many_steps_and_at_the_end(actors):
    module = policy()
    weights, seen = tr.SharedWeights(module), []

    def learn(batch):
        seen.append(weights.version)
        with torch.no_grad():
            module.weight += 1

    pool = ExplorerPool(print, 1, filled(), weights)
    stats = AsyncReplay(pool, learn, module, publish_every=4).run(10)
    assert seen == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert stats.publications == weights.version == 3
    newest = policy()
    weights.pull(newest)
    assert newest.weight.item() == 10


def test_each_of_several_policies_has_its_buffer_and_its_weights(actors):
    buffers = {"red": filled(), "blue": filled()}
    modules = {"red": policy(1.0), "blue": policy(2.0)}
    weights = {name: tr.SharedWeights(policy()) for name in modules}
    pool = ExplorerPool(print, 1, buffers, weights)
    stats = AsyncReplay(pool, lambda batches: {"red": batches["red"]["number"] + 1.0}, modules, batch_size=4).run(5)
    assert stats.items == 2 * 5 * 4
    assert {name: s.updated for name, s in stats.buffers.items()} == {"red": 20, "blue": 0}
    for name, module in modules.items():
        pulled = policy()
        weights[name].pull(pulled)
        assert torch.equal(pulled.weight, module.weight)


def test_steps_can_be_made_one_by_one_and_several_times(actors):
    replay = AsyncReplay(ExplorerPool(print, 1, filled()), lambda batch: None)
    with replay:
        assert list(replay.steps(3)) == [1, 2, 3]
        for step in replay.steps(1000):
            if step == 7:
                break
        assert replay.stats().steps == 7
    assert replay.pool.stats()[0].state == "stopped"
    with pytest.raises(RuntimeError, match="inside"):
        next(replay.steps(1))


def test_a_state_goes_on_with_the_next_batch(actors):
    def learner(seen, restored=None):
        buffer = restored or filled()
        pool = ExplorerPool(print, 1, buffer)
        return AsyncReplay(pool, lambda batch: seen.append(batch["key"].tolist()), batch_size=8)

    whole, first, second = [], [], []
    learner(whole).run(12)
    interrupted = learner(first)
    with interrupted:
        for step in interrupted.steps(100):
            if step == 5:
                state = interrupted.state_dict()
                break
    assert (state["steps"], state["publications"]) == (5, 0)
    resumed = learner(second)
    resumed.load_state_dict(state)
    assert resumed.run(7).steps == 12
    assert first + second == whole
    for wrong in ({}, {**state, "steps": -1}, {**state, "dataset": 3}, 7):
        with pytest.raises(ValueError, match=r"state|steps"):
            resumed.load_state_dict(wrong)


def test_a_learner_without_explorers_is_told_so(monkeypatch):
    monkeypatch.setattr(WorkerResources, "open", lambda *_: ScriptedActors(lambda launch: RAISED))
    monkeypatch.setattr("torchreplay.ray.training.throughput._LOOK_EVERY", 0.0)
    pool = ExplorerPool(print, 1, filled(), max_restarts=0)
    replay = AsyncReplay(pool, lambda batch: None)
    with replay:
        eventually(lambda: pool.stats()[0].state == "failed")
        with pytest.raises(ExplorersFailed, match="boom"):
            list(replay.steps(10))


def test_explorers_are_stopped_when_the_first_look_at_the_buffers_fails(actors, monkeypatch):
    pool = ExplorerPool(print, 1, filled())
    replay = AsyncReplay(pool, lambda batch: None)

    def fail():
        raise ValueError("3 TD errors are NaN")

    monkeypatch.setattr(pool.buffer, "stats", fail)
    with pytest.raises(ValueError, match="NaN"):
        replay.run(1)
    assert pool.stats()[0].state == "stopped"
    with pytest.raises(RuntimeError, match="the explorers do not run"):
        list(replay.steps(1))


def test_rates_of_a_run_shorter_than_a_look_are_those_of_the_run(actors):
    buffer = filled()

    def learn(batch):
        buffer.extend(number=torch.arange(4))

    began = time.monotonic()
    replay = AsyncReplay(ExplorerPool(print, 1, buffer), learn, batch_size=8)
    for stats in (replay.run(50), replay.stats()):
        assert stats.items_per_second >= 50 * 8 / (time.monotonic() - began)
        assert stats.rows_per_second == pytest.approx(stats.items_per_second / 2)
    with replay:
        for _ in replay.steps(50):
            pass
    stats = replay.stats()
    assert stats.items_per_second >= 50 * 8 / (time.monotonic() - began)
    assert replay.stats().items_per_second == stats.items_per_second


def test_runs_inside_a_block_leave_its_workers_to_it(actors):
    pool = ExplorerPool(print, 1, filled())
    with AsyncReplay(pool, lambda batch: None, batch_size=8) as replay:
        for steps in (3, 6):
            assert replay.run(3).steps == steps
            assert pool.stats()[0].state != "stopped"
        assert list(replay.steps(1)) == [7]
    assert pool.stats()[0].state == "stopped"


def test_a_buffer_that_is_closed_inside_costs_a_run_nothing_but_its_last_rates(actors):
    buffer = filled()
    with AsyncReplay(ExplorerPool(print, 1, buffer), lambda batch: None, batch_size=8) as replay:
        list(replay.steps(3))
        buffer.close()


def test_what_a_run_cannot_do_is_refused_before_any_worker_starts(actors):
    replay = AsyncReplay(ExplorerPool(print, 1, filled()), print)
    for steps in (-1, None):
        with pytest.raises(ValueError, match=f"steps is {steps}"):
            replay.run(steps)
        with pytest.raises(ValueError, match=f"steps is {steps}"):
            replay.steps(steps)
    assert actors.runs == []


def test_a_module_that_is_built_otherwise_than_its_weights_is_refused_at_once():
    pool = ExplorerPool(print, 1, filled(), tr.SharedWeights(torch.nn.Linear(2, 1)))
    with pytest.raises(ValueError, match="the module's weights differ from those shared in bias, weight"):
        AsyncReplay(pool, print, torch.nn.Linear(3, 3))


def test_a_stopped_buffer_ends_the_steps(actors):
    buffer = filled()

    def learn(batch):
        if buffer.stats().draws > 5:
            buffer.stop()

    assert AsyncReplay(ExplorerPool(print, 1, buffer), learn, prefetch=0).run(100).steps == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"publish_every": 0}, "publish_every is 0"),
        ({"batch_size": 0}, "batch_size"),
        ({"module": policy()}, "expected a module for each"),
        ({"module": {"red": policy()}}, "expected a module for each"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AsyncReplay(**{"pool": ExplorerPool(print, 1, filled()), "learn": print, **arguments})


def test_an_evaluator_of_weights_that_nobody_publishes_is_refused():
    module = policy()
    weights, others = tr.SharedWeights(module), tr.SharedWeights(module)
    for pool_weights, modules in ((weights, module), (None, None)):
        pool = ExplorerPool(print, 1, filled(), pool_weights)
        with pytest.raises(ValueError, match="the evaluator's weights are none of the pool's"):
            AsyncReplay(pool, print, modules, evaluator=Evaluator(evaluate, others, policy, every=1))
    evaluator = Evaluator(evaluate, weights, policy, every=1)
    AsyncReplay(ExplorerPool(print, 1, filled(), weights), print, module, evaluator=evaluator)


def test_the_rate_of_rows_is_that_of_those_written_also_when_a_shard_is_lost_or_does_not_answer_once(monkeypatch):
    now, rows = 0.0, {"here": 1_000_000, "there": 1_000_000}
    monkeypatch.setattr("torchreplay.ray.training.throughput.time", SimpleNamespace(monotonic=lambda: now))
    meter = Throughput(["draw"])
    meter.start(rows, 0)
    for second in range(1, 90):
        now = float(second)
        rows = {name: count + 1000 for name, count in rows.items()}
        if second == 60:
            del rows["there"]
        told = {"here": rows["here"]} if second == 30 else rows
        meter.look(told, 5 * second)
        if second not in (30, 40):  # when the window ends, or begins, with it
            expected = 2000 if second < 60 else 1000 + 1000 * max(0, 69 - second) / 10
            assert meter.throughput(None) == (pytest.approx(expected), 5)


def explore(ctx):
    module, writer, count = policy(), ctx.writer(), 0
    while not ctx.stopped:
        ctx.pull_weights(module)
        writer.append(**row(ctx.index, ctx.seed, count))
        count += 1


def evaluate(module, seed):
    return [module.weight.item()]


@pytest.mark.slow
def test_explorers_learner_and_evaluator_run_together(tmp_path):
    buffer, module = make_buffer(limiter=tr.SamplesPerInsert(4.0, min_size=100)), policy()
    weights = tr.SharedWeights(module)

    def learn(batch):
        with torch.no_grad():
            module.weight += 1
        return batch["weight"]

    pool = ExplorerPool(explore, 1, buffer, weights, backend="process")
    evaluator = Evaluator(evaluate, weights, policy, every_seconds=0.1, directory=tmp_path, backend="process")
    stats = AsyncReplay(pool, learn, module, batch_size=16, evaluator=evaluator, timeout=150).run(200)
    assert stats.evaluation.mean_return == module.weight.item() == 200
    assert stats.evaluation.version == weights.version
    assert stats.weight_syncs >= 1
    assert stats.buffers["buffer"].samples_per_insert == pytest.approx(4.0, rel=0.5)
    assert stats.explorers[0].rows >= 100
    assert (tmp_path / "best.safetensors").exists()
    assert (pool.stats()[0].state, evaluator.stats().state) == ("stopped", "stopped")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pool": make_buffer}, r"pool is .*: expected a torchreplay\.ray\.ExplorerPool"),
        ({"learn": None}, "learn is None: expected a function of a batch"),
        ({"module": 3}, r"module is 3: expected a torch\.nn\.Module"),
        ({"evaluator": evaluate}, r"evaluator is .*: expected a torchreplay\.ray\.Evaluator"),
    ],
)
def test_arguments_of_another_kind_are_refused_with_their_name(arguments, message):
    with pytest.raises(TypeError, match=message):
        AsyncReplay(**{"pool": ExplorerPool(print, 1, filled()), "learn": print, **arguments})
