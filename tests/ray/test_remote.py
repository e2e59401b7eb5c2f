"""Buffers and weights that are passed to other nodes of a Ray cluster: real nodes, real kills."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from remote_explorers import STEPS, Explorer, Owner, assert_complete, make_buffer, rows_of, write_when_it_is_closed
from rollouts import ROLLOUTS, assert_rollouts, rollout, write_rollouts

import torchreplay as tr
from torchreplay.ray.remote import remote_weights
from torchreplay.ray.runtime import actor_client
from torchreplay.ray.runtime.actor_client import ActorClient, NodeActor
from torchreplay.segment import waits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(shared_cluster):
    with shared_cluster.of(3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def explorers(cluster):
    """An explorer on each node, which tests give buffers to."""
    return [cluster.ray.remote(Explorer).options(**cluster.on(node)).remote() for node in range(3)]


@pytest.fixture
def explorer(cluster, explorers):
    """Gives a buffer to the explorer of a node; after the test it has none."""
    given = []

    def give(node, buffer, index=0):
        given.append(explorers[node])
        cluster.ray.get(explorers[node].open.remote(buffer, index))
        return explorers[node]

    yield give
    cluster.ray.get([actor.let_go.remote() for actor in given])


def serving_pid(cluster, kind, shared):
    """The process of the actor that serves this buffer, or these weights, to other nodes; None while there is none."""
    for actor in cluster.actors(kind):
        if actor["Name"].endswith(f"{shared._nonce:016x}") and actor["State"] == "ALIVE":
            return actor["Pid"]
    return None


def kill_serving(cluster, kind, shared):
    """Kills that process, as soon as there is one, and returns its pid."""
    eventually(lambda: serving_pid(cluster, kind, shared), 120)
    pid = serving_pid(cluster, kind, shared)
    os.kill(pid, signal.SIGKILL)
    return pid


def test_rows_of_two_nodes_arrive_complete_in_order_and_not_through_shared_memory(cluster, explorer):
    buffer = make_buffer()
    far = [explorer(node, buffer, node) for node in (1, 2)]
    ray = cluster.ray
    for actor in far:
        kind, text, _ = ray.get(actor.kind.remote())
        assert kind == "RemoteBuffer"
        assert cluster.node_ids[0] in text
    assert ray.get([actor.write.remote(700) for actor in far]) == [700, 700]
    assert_complete(buffer, {1: 700, 2: 700})
    inode = os.fstat(buffer._segment.fd).st_ino
    for inodes in ray.get([actor.mapped.remote() for actor in far]):
        assert inode not in inodes
    eventually(lambda: buffer.stats().writers == 2)
    assert len(buffer.sample(32)["key"]) == 32


def test_on_its_own_node_the_buffer_is_the_same_memory_and_comes_back_from_others_as_that(cluster, explorer):
    buffer = make_buffer()
    here, there = explorer(0, buffer, 1), explorer(1, buffer, 2)
    assert cluster.ray.get(here.kind.remote())[0] == "ReplayBuffer"
    assert cluster.ray.get(there.kind.remote())[0] == "RemoteBuffer"
    inode = os.fstat(buffer._segment.fd).st_ino
    assert inode in cluster.ray.get(here.mapped.remote())
    back = cluster.ray.get(there.try_to.remote(lambda buffer, writer: buffer))
    assert isinstance(back, tr.ReplayBuffer)
    assert os.fstat(back._segment.fd).st_ino == inode
    back.close()


def test_streams_of_lanes_are_linked_as_they_were_written(cluster, explorer):
    view = tr.Transitions(n_step=2, gamma=1.0)
    buffer, plain = (tr.ReplayBuffer(STEPS, 5000, view=view, seed=0) for _ in range(2))
    num_envs, steps, seeds = 3, 60, (1, 2)
    far = [explorer(seed, buffer) for seed in seeds]
    cluster.ray.get([actor.step.remote(seed, num_envs, steps) for actor, seed in zip(far, seeds, strict=True)])
    for seed in seeds:
        local = Explorer()
        local.buffer = plain
        local.step(seed, num_envs, steps)
    assert len(buffer) == len(plain)
    assert _items(buffer) == _items(plain)
    assert len(_items(buffer)) > len(buffer) / 2


def test_episodes_that_are_ended_on_another_node_end_here(cluster, explorer):
    buffer, plain = (tr.ReplayBuffer(STEPS, 500, view=tr.Transitions(n_step=4, gamma=1.0), seed=0) for _ in range(2))
    cluster.ray.get(explorer(1, buffer).end.remote(3))
    local = Explorer()
    local.buffer = plain
    local.end(3)
    assert _items(buffer) == _items(plain)
    assert len(_items(buffer)) == 3 + 1 + 4
    assert buffer.gather(buffer.keys())["truncated"].all()


def _items(buffer):
    batch = buffer.gather(torch.arange(len(buffer)))
    columns = (batch["obs"], batch["next_obs"], batch["reward"][:, None], batch["terminated"][:, None])
    return sorted(tuple(row) for row in torch.cat([column.double() for column in columns], 1).tolist())


def test_bad_input_is_refused_at_once_with_the_errors_of_every_writer(cluster, explorer):
    buffer = make_buffer()
    far = explorer(1, buffer, 1)
    frame = np.zeros(400, np.float32)

    def refused(call):
        return cluster.ray.get(far.try_to.remote(call))

    def local(call):
        with buffer.writer() as writer, pytest.raises(Exception) as caught:
            call(buffer, writer)
        return caught.type, str(caught.value)

    for call in (
        lambda b, w: w.append(writer=0, count=0),
        lambda b, w: w.append(writer=0, count=0.5, frame=frame),
        lambda b, w: w.append(writer=0, count=0, frame=frame[1:]),
        lambda b, w: w.append(writer=0, count=0, frame=frame, priority=float("nan")),
        lambda b, w: w.append(writer=0, count=np.uint64(2**63), frame=frame),
        lambda b, w: w.append(writer=0, count=0, frame=np.full(400, 1e300)),
        lambda b, w: w.append(writer=0, count=0, frame=np.ma.array(frame, mask=frame == frame)),
        write_when_it_is_closed,
        lambda b, w: w.step(writer=0, count=0, frame=frame),
        lambda b, w: w.append(1),
        lambda b, w: b.writer(num_envs=2),
        lambda b, w: b.writer(autoreset="other"),
        lambda b, w: [closed.close() or closed.flush() or closed.append() for closed in [b.writer()]],
        lambda b, w: b.extend(writer=[0, 1], count=[0], frame=[frame]),
    ):
        assert refused(call) == local(call)
    for call in (lambda b, w: b.sample(3), lambda b, w: setattr(b, "limiter", tr.MinSize(3))):
        kind, text = refused(call)
        assert kind is AttributeError
        assert "learners run on the buffer's" in text
    assert cluster.ray.get(far.write.remote(3)) == 3
    assert_complete(buffer, {1: 3})
    assert refused(lambda b, w: (len(b), b.capacity, b.limiter, b.stats().rows_written)) == (3, 50_000, tr.MinSize(), 3)


def test_a_killed_ingest_loses_and_doubles_nothing(cluster, explorer):
    buffer = make_buffer(200_000)
    far = [explorer(node, buffer, node) for node in (1, 2)]
    ends = [actor.write_until_stopped.remote() for actor in far]
    killed = set()
    for _ in range(2):
        before = len(buffer)
        eventually(lambda before=before: len(buffer) > before + 200, 120)
        killed.add(kill_serving(cluster, "Ingest", buffer))
        eventually(lambda: serving_pid(cluster, "Ingest", buffer) not in (None, *killed), 120)
    assert len(killed) == 2
    before = len(buffer)
    eventually(lambda: len(buffer) > before + 200, 120)
    buffer.stop()
    results = cluster.ray.get(ends)
    assert [(text, stopped) for _, text, stopped in results] == [("the replay buffer was stopped", True)] * 2
    rows = rows_of(buffer)
    for writer, (written, *_) in zip((1, 2), results, strict=True):
        counts = rows["count"][rows["writer"] == writer]
        assert torch.equal(counts, torch.arange(len(counts)))
        assert written - 10 <= len(counts) <= written, "only the last ten were not acknowledged"


def test_values_of_any_length_of_another_node_come_as_they_are_and_outlast_a_killed_ingest(cluster, explorer):
    buffer = tr.ReplayBuffer(ROLLOUTS, 2000, ragged_bytes=1 << 22)
    far = explorer(1, buffer)

    def do(call):
        return cluster.ray.get(far.try_to.remote(call))

    def refused(call):
        with buffer.writer() as writer, pytest.raises(ValueError) as caught:  # the texts are compared
            call(buffer, writer)
        return do(call) == (caught.type, str(caught.value))

    do(lambda b, w: write_rollouts(b, w, 0, 300))
    kill_serving(cluster, "Ingest", buffer)
    do(lambda b, w: write_rollouts(b, w, 300, 301))
    assert assert_rollouts(buffer.gather(buffer.keys())) == list(range(601))
    assert refused(lambda b, w: w.append(**rollout(1) | {"text": bytes(1 << 21)}))
    assert refused(lambda b, w: w.append(**rollout(1) | {"logprob": [0.5]}))
    assert refused(lambda b, w: w.append(**rollout(1) | {"text": "no bytes"}))
    # Half of all that fits, and the rollouts before and behind it.
    do(lambda b, w: write_rollouts(b, w, 601, 8))
    do(lambda b, w: w.append(**rollout(609) | {"text": bytes(1 << 20)[:-900]}))
    do(lambda b, w: w.append(**rollout(610)))
    do(lambda b, w: w.flush())
    assert buffer.stats().rows_written == 611
    assert buffer.gather([609]).lengths("text").tolist() == [(1 << 20) - 900]
    assert assert_rollouts(buffer.gather([*range(601, 609), 610])) == [*range(601, 609), 610]


def test_questions_and_idle_writers_outlast_a_killed_ingest(cluster, explorer):
    buffer = make_buffer()
    far = explorer(1, buffer, 1)
    assert cluster.ray.get(far.write.remote(3)) == 3
    kill_serving(cluster, "Ingest", buffer)
    assert cluster.ray.get(far.try_to.remote(lambda b, w: len(b))) == 3
    eventually(lambda: buffer.stats().writers == 1, 120)
    assert_complete(buffer, {1: 3})


def test_a_learner_that_waits_for_rows_outlasts_a_killed_ingest(cluster, explorer, monkeypatch):
    monkeypatch.setattr(waits, "RETURN_GRACE", 0.1)  # less than it takes to start a process
    buffer = make_buffer(limiter=tr.MinSize(20))
    far = explorer(1, buffer, 1)
    assert cluster.ray.get(far.write.remote(10)) == 10
    with ThreadPoolExecutor(1) as learner:
        batch = learner.submit(buffer.sample, 4)
        killed = kill_serving(cluster, "Ingest", buffer)
        eventually(lambda: serving_pid(cluster, "Ingest", buffer) not in (None, killed), 120)
        assert cluster.ray.get(far.write.remote(10)) == 20
        assert len(batch.result(120)["key"]) == 4


def test_an_explorer_that_is_interrupted_wherever_it_is_loses_and_doubles_nothing(cluster, explorer):
    buffer = make_buffer()
    far = explorer(1, buffer, 1)
    assert cluster.ray.get(far.write_interrupted.remote(20_000)) > 5
    assert_complete(buffer, {1: 20_000})


def test_a_writer_too_many_is_told_so_and_the_others_go_on(cluster, explorer):
    buffer = make_buffer()
    far = explorer(1, buffer, 1)
    assert cluster.ray.get(far.write.remote(3)) == 3
    entries = buffer._sampler.delivery_log.entries
    free = entries["writer"] == 0
    entries["writer"][free], entries["used"][free] = 7, time.monotonic()  # as if so many others wrote, too

    def write_by_another(buffer, writer):
        with buffer.writer() as another:
            another.append(writer=2, count=0, frame=np.zeros(400, np.float32))
            another.flush()

    def extend(buffer, writer):
        frames = np.array([[0.25], [1.25]]).repeat(400, axis=1)
        return buffer.extend(writer=np.array([2, 2]), count=np.array([0, 1]), frame=frames)

    for call in (write_by_another, extend):
        kind, text = cluster.ray.get(far.try_to.remote(call))
        assert kind is RuntimeError
        assert "1024 remote writers write to one buffer" in text
    assert cluster.ray.get(far.write.remote(3)) == 6
    assert_complete(buffer, {1: 6})
    entries["writer"][free] = 0  # the others have gone
    assert cluster.ray.get(far.try_to.remote(extend)) is None
    assert_complete(buffer, {1: 6, 2: 2})


def test_a_forked_child_cannot_write_between_its_parents_rows(cluster, explorer):
    buffer = make_buffer()
    far = explorer(1, buffer, 1)
    assert cluster.ray.get(far.write.remote(5)) == 5
    closed, *others = cluster.ray.get(far.fork.remote())
    assert closed == "ValueError: the writer is closed: make another with buffer.writer()"
    assert len(others) == 3
    for told in others:
        assert told.startswith("RuntimeError: what is on another node does not survive a fork")
    assert cluster.ray.get(far.write.remote(5)) == 10
    assert_complete(buffer, {1: 10})


def test_what_a_process_does_at_its_end_sends_what_its_open_writers_have_written(cluster, explorer):
    buffer = make_buffer()
    far = explorer(1, buffer, 1)
    assert cluster.ray.get(far.write.remote(1)) == 1
    cluster.ray.get(far.append.remote(3000))
    assert cluster.ray.get(far.try_to.remote(lambda b, w: b.drain())) is None
    assert_complete(buffer, {1: 3001})
    eventually(lambda: buffer.stats().writers == 0)


def test_a_limiter_holds_remote_writers_back_until_the_learner_draws(cluster, explorer):
    buffer = make_buffer(limiter=tr.SamplesPerInsert(1.0, min_size=50, tolerance=0.2))
    far = explorer(1, buffer, 1)
    end = far.write.remote(600)
    eventually(lambda: len(buffer) >= 50, 120)
    drawn = 0
    while not cluster.ray.wait([end], timeout=0.01)[0]:
        # At most `tolerance` ahead of the draws. A writer may be ahead by 64 rows that were under way at the last look,
        # and by 64 that it begins.
        assert len(buffer) <= 50 + 10 + drawn + 2 * 64
        if drawn < 550:  # 600 rows admit no more: a batch needs 40 + drawn + 10 of them
            buffer.sample(10, timeout=120)
            drawn += 10
    assert_complete(buffer, {1: 600})


def test_a_full_queue_keeps_remote_writers_waiting_and_says_whose_doing_it_is(cluster, explorer):
    buffer, held = make_buffer(50, sampler=tr.Fifo()), shared_counters(1)
    far = explorer(1, buffer, 1)

    def hold():
        held[0] = len(buffer.sample(30)["count"])
        signal.pause()

    def write(_, writer):
        writer.timeout = 5.0
        row = {"writer": 1, "count": 0, "frame": np.zeros(400, np.float32)}
        while True:
            writer.append(**row)

    with Forked(hold) as holder:
        end = far.try_to.remote(write)
        eventually(lambda: held[0] == 30, 120)
        holder.signal(signal.SIGSTOP)
        kind, text = cluster.ray.get(end)
        assert kind is tr.ReplayTimeout
        assert text == (
            f"append() found no room within 5 s: it waits for room in the queue: the queue is full: 20 items wait to "
            f"be drawn; 30 are held: 30 by process {holder.pid}, which is stopped (continue it with `kill -CONT "
            f"{holder.pid}`); capacity: 50 rows"
        )
    buffer.stop()


def test_unfinished_episodes_of_remote_writers_that_fill_a_queue_are_named(cluster, explorer):
    buffer = tr.ReplayBuffer(STEPS, 12, view=tr.Sequences(length=8), sampler=tr.Fifo())

    def write(buffer, writer):
        writer.close()  # or it might write, for all that is known
        obs, flags = np.zeros((2, 2), int), np.zeros(2, bool)
        with buffer.writer(num_envs=2) as writer:
            writer.reset(obs=obs)
            for _ in range(20):
                writer.step(obs=obs, reward=flags, terminated=flags, truncated=flags)
            writer.flush()

    ends = [explorer(node, buffer, node).try_to.remote(write) for node in (1, 2)]
    for kind, text in cluster.ray.get(ends):
        assert issubclass(kind, RuntimeError)
        # Of one writer's chunk, or of both, as they came; an item has nine rows, and each episode one more before it.
        environments = int(re.search(r"unfinished episodes of (\d) environments fill the 12 rows", text)[1])
        assert environments in (2, 3, 4)
        assert f"a capacity of at least {10 * environments}" in text
    buffer.stop()


@pytest.mark.soak
def test_stop_ends_a_writer_that_waits_for_the_limiter_and_the_ingest_goes(cluster, explorer):
    buffer = make_buffer(limiter=tr.SamplesPerInsert(1.0, min_size=10))
    end = explorer(2, buffer, 2).write_until_stopped.remote()
    eventually(lambda: len(buffer) > 10, 120)
    ingest = serving_pid(cluster, "Ingest", buffer)
    assert ingest
    buffer.stop()
    assert cluster.ray.get(end)[1:] == ("the replay buffer was stopped", True)
    eventually(lambda: not os.path.exists(f"/proc/{ingest}"), 120)


def test_a_stop_on_another_node_holds_there_at_once_and_for_those_who_come_late(cluster, explorer, explorers):
    buffer = make_buffer()
    far = explorer(1, buffer, 1)
    assert cluster.ray.get(far.try_to.remote(lambda b, w: (b.stop(), b.stopped))) == (None, True)
    assert buffer.stopped
    assert cluster.ray.get(explorers[2].come_late.remote(buffer)) == (True, "the replay buffer was stopped")


@pytest.mark.soak
def test_a_killed_explorer_costs_its_unsent_rows_and_implies_no_end(cluster, explorer):
    buffer = make_buffer()
    victim, other = cluster.ray.remote(Explorer).options(**cluster.on(1)).remote(), explorer(2, buffer, 2)
    cluster.ray.get(victim.open.remote(buffer, 1))
    assert cluster.ray.get(victim.write.remote(50)) == 50
    victim.write_until_stopped.remote()
    eventually(lambda: len(buffer) > 100, 120)
    cluster.ray.kill(victim)
    assert cluster.ray.get(other.write.remote(300)) == 300
    eventually(lambda: buffer.stats().writers == 1, 120)
    rows = rows_of(buffer)
    counts = rows["count"][rows["writer"] == 1]
    assert torch.equal(counts, torch.arange(len(counts)))
    assert len(counts) > 50


def test_a_killed_node_costs_its_explorers_and_nothing_else(cluster, explorer):
    buffer = make_buffer()
    staying = explorer(1, buffer, 1)
    with cluster.one_more() as node:
        lost = cluster.ray.remote(Explorer).options(**cluster.on(node)).remote()
        cluster.ray.get(lost.open.remote(buffer, 2))
        assert cluster.ray.get(lost.write.remote(100)) == 100
        cluster.kill(node)
    assert cluster.ray.get(staying.write.remote(100)) == 100
    assert_complete(buffer, {1: 100, 2: 100})


@pytest.mark.soak
def test_the_writers_of_a_buffer_that_is_gone_are_told(cluster, explorer):
    owner = cluster.ray.remote(Owner).options(**cluster.on(2)).remote()
    buffer_there = cluster.ray.get(owner.lend.remote())
    far = explorer(1, *buffer_there, 1)
    end = far.write_until_stopped.remote()
    eventually(lambda: cluster.ray.get(owner.count.remote()) > 20, 120)
    cluster.ray.kill(owner)
    _, text, stopped = cluster.ray.get(end)
    assert stopped
    assert "gone" in text


def test_weights_are_pulled_when_they_are_newer(cluster, explorers):
    module = torch.nn.Linear(3, 1, bias=False)
    weights = tr.SharedWeights(module)
    far = explorers[1]
    start = pytest.approx(float(module.weight.detach().sum()))
    assert cluster.ray.get(far.pull.remote(weights, 0)) == [(True, start), (False, start)]
    for value in (1.0, 2.0):
        with torch.no_grad():
            module.weight.fill_(value)
        version = weights.publish(module)
        assert cluster.ray.get(far.pull.remote(None, version)) == [(True, 3 * value), (False, 3 * value)]
    text = cluster.ray.get(far.publish.remote())
    assert "published where they were made" in text


@pytest.mark.soak
def test_news_of_weights_comes_also_when_the_actor_that_tells_it_was_killed(cluster, explorers):
    module = torch.nn.Linear(3, 1, bias=False)
    weights = tr.SharedWeights(module)
    far = explorers[1]
    assert len(cluster.ray.get(far.pull.remote(weights, 0))) == 2
    kill_serving(cluster, "WeightsActor", weights)
    with torch.no_grad():
        module.weight.fill_(1.0)
    version = weights.publish(module)
    assert cluster.ray.get(far.pull.remote(None, version)) == [(True, 3.0), (False, 3.0)]


class LateHome(NodeActor):
    """In place of the actor on the weights' node: hands out version 1, a reference whose bytes come when they may."""

    asked, there = 0, True

    def __init__(self, *_):
        ActorClient.__init__(self, "the node there", "forked")
        self.node = "there"
        LateHome.made = self

    def ask_once(self, what, *args):
        if what == "newer":
            return args[0], "no more"
        if not self.there:
            self._find()
        self.asked += 1
        return 1, self.asked

    def is_there(self):
        return self.there


def test_weights_whose_bytes_are_lost_on_their_way_are_asked_for_again(monkeypatch):
    module = torch.nn.Linear(3, 1, bias=False)
    content = tr.SharedWeights(module)._native.buffer(0).numpy()
    come_with = 3

    def get(asked):
        if asked < come_with:
            raise ray.exceptions.OwnerDiedError("0" * 56, None, "")
        return content

    ray = pytest.importorskip("ray")
    monkeypatch.setattr(remote_weights, "NodeActor", LateHome)
    monkeypatch.setattr(remote_weights, "import_ray", lambda: SimpleNamespace(get=get, exceptions=ray.exceptions))
    monkeypatch.setattr(actor_client, "_PAUSE", 0.0)
    _, (handle, *described, _) = tr.SharedWeights(module).__reduce__()
    weights = remote_weights.RemoteWeights(handle, *described)
    modules = [torch.nn.Linear(3, 1, bias=False) for _ in range(3)]
    assert weights.pull(modules[0])
    assert LateHome.made.asked == 3
    come_with = 1 << 30
    monkeypatch.setattr(actor_client, "ASK_AGAIN_SECONDS", 0.1)
    weights._news.version = 2
    assert not weights.pull(modules[0])  # it has some
    assert weights.pull(modules[1])  # this one has none, and gets those that there are
    assert all(torch.equal(filled.weight, module.weight) for filled in modules[:2])
    fresh = remote_weights.RemoteWeights(handle, *described)
    with pytest.raises(tr.AttachError, match="nothing reaches the node there"):
        fresh.pull(modules[2])
    LateHome.made.there = False
    with pytest.raises(tr.AttachError, match="the node there is gone"):
        fresh.pull(modules[2])


def test_a_handle_of_another_node_is_refused_where_only_memory_will_do(cluster):
    @cluster.ray.remote
    def attach(handle):
        from torchreplay.segment.handle import open_handle

        try:
            open_handle(handle, "thing")
        except tr.AttachError as error:
            return str(error)

    handle = make_buffer().handle()
    assert handle.node == cluster.node_ids[0]
    text = cluster.ray.get(attach.options(**cluster.on(1)).remote(handle))
    assert "another Ray node" in text
