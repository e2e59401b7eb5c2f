"""What an explorer's function gets: its context, and the table of its pool."""

import inspect
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numbered_rows import make_buffer, row
from scripted_workers import ScriptedActors, supervise

import torchreplay as tr
from torchreplay.checking.loop_recording import RecordedBuffer
from torchreplay.ray import ExplorerContext, RemoteBuffer, ShardedReplay
from torchreplay.ray.sharded.local_shard import ShardBuffer
from torchreplay.workers.explorer_stats import explorer_stats
from torchreplay.workers.worker_table import WorkerTable


def test_an_explorers_function_can_be_tried_without_ray():
    buffer = make_buffer()

    def explore(ctx):
        writer = ctx.writer()
        for count in range(10):
            writer.append(**row(ctx.index, ctx.seed, count))
        ctx.record(episode_return=3.0, episode_length=10)

    ctx = ExplorerContext(buffer, seed=5)
    explore(ctx)
    ctx.close()
    assert len(buffer) == 10
    assert int(ctx._table.entries[0]["rows"]) == 10
    assert "explorer 0 of 1" in repr(ctx)
    assert "episodes=1" in repr(ctx)


def test_closing_a_context_closes_its_writers():
    ctx = ExplorerContext(make_buffer())
    writer = ctx.writer()
    ctx.close()
    with pytest.raises(ValueError, match="closed"):
        writer.append(**row(0, 0, 0))


def test_a_writer_that_cannot_be_closed_keeps_no_other_one_open(monkeypatch):
    def fail():
        raise RuntimeError("the writer is in use in another thread")

    ctx = ExplorerContext(make_buffer())
    broken, *others = [ctx.writer() for _ in range(8)]
    monkeypatch.setattr(broken, "close", fail)
    with pytest.raises(RuntimeError, match="in use"):
        ctx.close()
    assert all(writer.closed for writer in others)


def test_rows_of_writers_that_the_function_closes_itself_are_counted_once():
    ctx = ExplorerContext(make_buffer())
    for _ in range(3):
        with ctx.writer() as writer:
            for count in range(5):
                writer.append(**row(0, 0, count))
            assert not ctx.stopped
    ctx.close()
    assert int(ctx._table.entries[0]["rows"]) == 15


@pytest.mark.parametrize(
    "view",
    [
        tr.Transitions(),
        tr.Transitions(n_step=4),
        tr.Sequences(length=3),
        tr.Sequences(length=3, burn_in=1, stride=1),
        tr.Sequences(length=5, across_episodes=True),
        tr.Hindsight(achieved="at", desired="goal", compute_reward=lambda achieved, desired: achieved),
    ],
    ids=lambda view: f"{type(view).__name__}-{view.rows_of_an_item}",
)
@pytest.mark.parametrize("num_envs", [None, 2])
def test_a_writer_knows_its_first_item_as_the_buffer_does(view, num_envs):
    spec = {name: tr.Field() for name in ("obs", "at", "goal", "action", "reward")}
    spec |= {name: tr.Field((), torch.bool) for name in ("terminated", "truncated")}
    observed = ("obs", "at", "goal")
    if not isinstance(view, tr.Hindsight):
        view = replace(view, observation=observed)
    else:
        view = replace(view, observation="obs" if "at" in view.observation else observed)
    lead = () if num_envs is None else (num_envs,)
    ones = {name: np.ones(lead, np.float32) for name in spec}
    for length in range(7):  # of an episode, 1 to 6; 0: it does not end
        buffer = tr.ReplayBuffer(spec, 1000, view=view)
        with buffer.writer(num_envs) as writer:
            writer.reset(**{name: ones[name] for name in observed})
            for step in range(1, 9):
                ended = bool(length) and step == length
                flags = {"terminated": np.full(lead, ended), "truncated": np.zeros(lead, bool)}
                writer.step(**{**ones, **flags})
                assert (writer._completed > 0) == (buffer.stats().inserted > 0), (length, step)
                if ended and num_envs is None:
                    writer.reset(**{name: ones[name] for name in observed})
                    assert (writer._completed > 0) == (buffer.stats().inserted > 0)


def test_rows_and_episodes_of_a_vectorised_explorer_are_counted():
    spec = {"obs": tr.Field(), "action": tr.Field(), "reward": tr.Field()}
    ends = {"terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}
    buffer = tr.ReplayBuffer({**spec, **ends}, 100, view=tr.Transitions())
    table, lanes, rng = WorkerTable(1), 3, np.random.default_rng(0)
    ctx = ExplorerContext(buffer, table=table)
    envs = SimpleNamespace(num_envs=lanes, single_observation_space=None, metadata={"autoreset_mode": "NextStep"})
    writer = ctx.writer(envs)
    writer.reset(obs=np.zeros(lanes))
    episodes = []
    returns = np.zeros(lanes)
    lengths = np.zeros(lanes, int)
    ended = np.zeros(lanes, bool)
    for _ in range(20):
        goes_on = ~ended
        reward, ended = rng.normal(size=lanes) * goes_on, (rng.random(lanes) < 0.3) & goes_on
        zeros = np.zeros(lanes)
        writer.step(obs=zeros, action=zeros, reward=reward, terminated=ended, truncated=np.zeros(lanes, bool))
        returns, lengths = returns + reward, lengths + 1
        episodes += zip(returns[ended], lengths[ended], strict=True)
        ctx.record(episode_return=returns[ended], episode_length=lengths[ended])
        returns[ended], lengths[ended] = 0.0, 0
    stats = explorer_stats(0, table.entries[0])
    assert stats.rows == ctx.rows == len(buffer) == lanes * 21
    assert (stats.episodes, stats.steps) == (len(episodes), sum(n for _, n in episodes))
    assert math.isclose(stats.mean_return, sum(r for r, _ in episodes) / len(episodes), rel_tol=1e-9)


def test_the_writer_of_every_buffer_takes_the_arguments_of_replay_buffers():
    def taken(kind):
        return [(p.name, p.kind, p.default) for p in inspect.signature(kind.writer).parameters.values()]

    for kind in (RemoteBuffer, ShardedReplay, ShardBuffer, RecordedBuffer):
        assert taken(kind) == taken(tr.ReplayBuffer)
    assert taken(ExplorerContext)[:-1] == taken(tr.ReplayBuffer)
    assert taken(ExplorerContext)[-1][0] == "name"


def test_weights_are_pulled_when_newer_and_not_before_the_delay_is_over():
    policy, explorers_policy = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    weights, buffer = tr.SharedWeights(policy), make_buffer()
    table, published = WorkerTable(1), 0
    ctx = ExplorerContext(buffer, weights, max_weight_sync_delay=10, table=table)
    writer = ctx.writer()
    pulled = []
    for count in range(35):
        if count in (1, 2, 12, 34):
            published = weights.publish(policy)
        if ctx.pull_weights(explorers_policy):
            pulled.append((count, published))
        writer.append(**row(0, 0, count))
    # The first at once; version 2 ten rows later; version 3 as soon as ten more are over; then there is nothing newer.
    assert pulled == [(0, 0), (10, 2), (20, 3), (34, 4)]
    stats = explorer_stats(0, table.entries[0])
    assert (stats.weight_version, stats.weight_syncs) == (4, 4)
    assert ctx.pull_weights(torch.nn.Linear(1, 1))  # into another module: at once


def test_rows_that_the_buffer_itself_writes_count_as_an_explorers_own():
    policy, explorers_policy = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    weights, buffer, table = tr.SharedWeights(policy), make_buffer(), WorkerTable(1)
    three = {name: torch.zeros(3, *field.shape, dtype=field.dtype) for name, field in buffer.spec.items()}
    buffer.extend(**three)  # somebody else's
    ctx = ExplorerContext(buffer, weights, max_weight_sync_delay=10, table=table)
    pulled = []
    for count in range(0, 30, 3):
        weights.publish(policy)
        if ctx.pull_weights(explorers_policy):
            pulled.append(count)
        ctx.buffer.extend(**three)
    assert pulled == [0, 12, 24]
    with ctx.writer() as writer:
        writer.append(**row(0, 0, 0))
    ctx.close()
    assert ctx.rows == explorer_stats(0, table.entries[0]).rows == 31


def test_without_a_delay_weights_are_pulled_whenever_they_are_newer():
    policy, explorers_policy = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    weights = tr.SharedWeights(policy)
    ctx = ExplorerContext(make_buffer(), weights)
    assert ctx.pull_weights(explorers_policy)
    assert not ctx.pull_weights(explorers_policy)
    weights.publish(policy)
    assert ctx.pull_weights(explorers_policy)


def test_an_explorer_of_several_policies_has_a_writer_and_weights_for_each():
    buffers = {"red": make_buffer(), "blue": make_buffer()}
    policies = {name: torch.nn.Linear(1, 1) for name in buffers}
    weights = {name: tr.SharedWeights(policy) for name, policy in policies.items()}
    table = WorkerTable(1)
    ctx = ExplorerContext(buffers, weights, max_weight_sync_delay=3, table=table)
    weights["blue"].publish(policies["blue"])
    for count, name in enumerate(["red", "blue", "blue"]):
        with ctx.writer(name=name) as writer:
            writer.append(**row(0, 0, count))
        assert ctx.pull_weights(policies[name], name=name) == (count < 2)
    assert [len(buffer) for buffer in buffers.values()] == [1, 2]
    assert not ctx.stopped
    buffers["blue"].stop()
    assert ctx.stopped
    stats = explorer_stats(0, table.entries[0])
    assert (stats.rows, stats.weight_version, stats.weight_syncs) == (3, 0, 2)


@pytest.mark.parametrize("name", [None, "green"])
def test_a_name_that_there_is_not_is_refused(name):
    buffers = {"red": make_buffer(), "blue": make_buffer()}
    with pytest.raises(ValueError, match="expected one of 'red', 'blue'"):
        ExplorerContext(buffers).writer(name=name)
    with pytest.raises(ValueError, match="there is only one"):
        ExplorerContext(make_buffer()).writer(name="red")


def test_pulling_weights_that_nobody_gave_says_where_to_give_them():
    with pytest.raises(RuntimeError, match="weights="):
        ExplorerContext(make_buffer()).pull_weights(torch.nn.Linear(1, 1))


def test_a_context_is_stopped_by_its_pool_and_by_its_buffer():
    table, buffer = WorkerTable(1), make_buffer()
    ctx = ExplorerContext(buffer, table=table)
    assert not ctx.stopped
    table.stopped = True
    assert ctx.stopped
    table.stopped = False
    buffer.stop()
    assert ctx.stopped


def test_recorded_statistics_agree_with_a_plain_list_of_episodes():
    supervisor = supervise(ScriptedActors(lambda launch: None), num_explorers=2)
    ctx = ExplorerContext(make_buffer(), index=1, num_explorers=2, table=supervisor.table)
    rng = np.random.default_rng(0)
    episodes = [(float(rng.normal()), int(rng.integers(1, 500))) for _ in range(250)]
    for seen, (episode_return, length) in enumerate(episodes, start=1):
        ctx.record(episode_return=episode_return, episode_length=length)
        if seen in (1, 99, 100, 101, 250):
            stats = supervisor.stats()[1]
            window = episodes[:seen][-100:]
            assert (stats.episodes, stats.steps) == (seen, sum(n for _, n in episodes[:seen]))
            assert (stats.last_return, stats.last_length) == (episode_return, length)
            assert math.isclose(stats.mean_return, sum(r for r, _ in window) / len(window), rel_tol=1e-9)
            assert math.isclose(stats.mean_length, sum(n for _, n in window) / len(window), rel_tol=1e-9)
    untouched = supervisor.stats()[0]
    assert untouched.episodes == 0
    assert math.isnan(untouched.mean_return)
    supervisor.stop(0, 0)
