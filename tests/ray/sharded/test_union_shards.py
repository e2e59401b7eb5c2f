"""The shards of a union as the native core reaches them: one here, others over connections. Without Ray."""

import contextlib
import threading
import time

import numpy as np
import pytest
import torch
from forked import eventually
from local_shards import SPEC

import torchreplay as tr
from torchreplay import _C
from torchreplay.ray.sharded.batch_block import Layout
from torchreplay.ray.sharded.local_shard import LocalShard
from torchreplay.ray.sharded.shard_actor import Shard
from torchreplay.ray.sharded.shard_wire import ShardLink, ShardServer, read_report
from torchreplay.schema.config import Config

KEY_BITS, SECONDS, N, NONCE = 48, 20, 64, 1 << 63
pytestmark = pytest.mark.timeout(120)


class Union:
    """Shards of `sizes`. Number `here` is drawn from through shared memory, the others over connections.

    Attributes:
        before: Called with each other shard's number before it draws, where the native core does not answer.
    """

    def __init__(self, sizes=(50, 20, 80), here=0, sampler=None, native=True):
        config = Config.of(SPEC, 200, sampler or tr.Prioritized(alpha=1.0, eps=1e-9), None, None)
        self.sampler, self.layout, self.exchange = config.sampler, Layout(config.outputs()), _C.Exchange()
        self.before = lambda number: None
        self.shards, self.servers, self.links, self.local = [], [], [], None
        for number, size in enumerate(sizes):
            shard = Shard(number, config, 100 + number, None)
            handle = shard.open()
            if size:
                shard._buffer.extend(home=np.full(size, number), index=np.arange(size))
            self.shards.append(shard)
            if number == here:
                self.local = LocalShard(number, handle)
                self.links.append((number, None))
                continue
            draw = lambda *given, k=number: self._draw(k, *given)  # noqa: E731
            self.servers.append(ShardServer("127.0.0.1", draw, shard.update, shard._native if native else None))
            self.links.append((number, ShardLink(self.servers[-1].address, self.exchange)))
        natives = [(number, None if link is None else link.native) for number, link in self.links]
        segment = None if self.local is None else self.local.segment
        self.native = _C.UnionShards(self.exchange, natives, segment, 1.0, None)

    def _draw(self, number, *given):
        self.before(number)
        return self.shards[number].draw(*given)

    def ask(self, step, draws=None, place=None, n=N, slack=1.0):
        """Asks all shards, and returns what comes of it."""
        batch = self.layout.new_batch(n) if place is None and self.local is None else place
        tensors = None if batch is None else self.layout.tensors(batch)
        return self.native.draw(n, 0.5, self.sampler.weights, 7, 0, step, slack, batch, tensors, draws)

    def take(self, asked):
        """Returns the batch, and whether it was made of the first answers."""
        draw, batch = asked
        assert draw.wait(int(SECONDS * 1e9))
        made, _ = self.native.take_in(draw)
        return batch, made

    def leaves(self):
        """The leaf of each item, by shard."""
        return [shard._buffer.priorities(shard._buffer.keys()).numpy().astype(float) for shard in self.shards]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.native = None
        for _, link in self.links:
            if link is not None:
                link.close()
        for server in self.servers:
            server.close()
        if self.local is not None:
            self.local.close()
        for shard in self.shards:
            shard._buffer.close()


def assert_is_of(batch, leaves, beta=0.5):
    """Its keys, values, probabilities and weights are those of the union with these leaves."""
    home, index = batch["home"].numpy(), batch["index"].numpy()
    assert (batch["key"].numpy() == (home << KEY_BITS) + index).all()
    whole = np.concatenate(leaves)
    probability = np.array([leaves[h][i] for h, i in zip(home, index, strict=True)]) / whole.sum()
    np.testing.assert_allclose(batch["probability"].numpy(), probability, rtol=1e-5)
    weight = (whole.min() / whole.sum() / probability) ** beta
    np.testing.assert_allclose(batch["weight"].numpy(), weight, rtol=1e-5)


@pytest.mark.parametrize("here", [None, 0, 2])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("native", [True, False])
def test_batches_are_of_the_union_as_it_was_when_they_were_asked_for(here, ahead, native):
    """TD errors that were given before are known; those that come while a batch is under way do not change it."""
    with Union(here=here, native=native) as union:
        draws = _C.DrawsHere(union.local.segment) if ahead and here is not None else None
        union.take(union.ask(0))  # totals are known now
        asked, leaves, made = [], [], 0
        chance = np.random.default_rng(1)
        for step in range(1, 40):
            asked.append(union.ask(step, draws))
            leaves.append(union.leaves())
            keys = torch.tensor([(k << KEY_BITS) + i for k, n in enumerate((50, 20, 80)) for i in range(n)])
            td = torch.from_numpy(chance.uniform(0.5, 1.5, len(keys)))
            sent = union.native.feed_back(keys, td, NONCE)
            assert sum(count for _, count, _ in sent) == sum(n for k, n in enumerate((50, 20, 80)) if k != here)
            if union.local is not None:
                union.local.settle()
            for _, _, reply in sent:
                assert reply.wait(int(SECONDS * 1e9))
                assert (reply.lost, reply.text) == ("", b"")
            if len(asked) == 3:
                batch, plain = union.take(asked.pop(0))
                due = leaves.pop(0)
                made += plain
                if plain:
                    assert_is_of(batch, due)
        assert made > 30
        if draws is not None:
            draws.close()


def test_the_same_calls_bring_the_same_batches_whoever_makes_them():
    def batches(away, ahead):
        with Union() as union:
            draws = _C.DrawsHere(union.local.segment) if ahead else None
            union.take(union.ask(0))
            asked, found = [], []
            for step in range(1, 20):
                asked.append(union.ask(step, draws))
                if len(asked) == 3:
                    batch, plain = union.take(asked.pop(0))
                    found.append([plain, *(tensor.clone() for tensor in union.layout.tensors(batch))])
                    if away:
                        time.sleep(0.002)
                    assert union.native.feed_back(batch["key"], batch["weight"] + step, NONCE) is not None
            if draws is not None:
                draws.close()
            return found

    first = batches(away=False, ahead=False)
    for away, ahead in ((False, True), (True, False), (True, True)):
        for one, other in zip(first, batches(away, ahead), strict=True):
            assert one[0] == other[0]
            assert all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))


def test_a_shard_that_has_outgrown_its_candidates_leaves_the_batch_to_others():
    with Union() as union:
        union.take(union.ask(0))
        union.shards[1]._buffer.update_priorities(torch.arange(20), torch.full((20,), 1e6))
        asked = union.ask(1, slack=0.0)
        _, plain = union.take(asked)
        assert not plain
        batch, plain = union.take(union.ask(2))  # its total is known now
        assert plain
        assert_is_of(batch, union.leaves())


def test_an_empty_shard_here_holds_no_batch_up():
    with Union(sizes=(0, 20), here=0) as union:
        draws = _C.DrawsHere(union.local.segment)
        for step in range(3):
            batch, plain = union.take(union.ask(step, draws))
            assert plain
            assert (batch["home"] == 1).all()
        union.shards[0]._buffer.extend(home=np.zeros(30, np.int64), index=np.arange(30))
        homes = set()
        for step in range(3, 9):
            batch, plain = union.take(union.ask(step, draws))
            homes |= set(batch["home"].tolist()) if plain else set()
        assert homes == {0, 1}
        union.shards[0]._buffer.clear()
        draw, _ = asked = union.ask(9, draws)
        assert not union.take(asked)[1]
        assert draws.is_closed
        draw.abandon()


@pytest.mark.parametrize(
    ("keys", "td"),
    [
        ([0, 1], [1.0, float("nan")]),
        ([0, 1], [1.0]),
        ([0, 50], [1.0, 1.0]),  # no such row here
        ([0, (1 << KEY_BITS) + 20], [1.0, 1.0]),  # nor there
        ([0, 9 << KEY_BITS], [1.0, 1.0]),  # no such shard
        ([0, -1], [1.0, 1.0]),
        ([0.5, 1.0], [1.0, 1.0]),
    ],
)
def test_what_is_wrong_is_left_to_whoever_says_why_and_nothing_is_applied(keys, td):
    with Union() as union:
        union.take(union.ask(0))
        before = union.leaves()
        assert union.native.feed_back(torch.tensor(keys), torch.tensor(td), NONCE) is None
        union.local.settle()
        assert all((a == b).all() for a, b in zip(before, union.leaves(), strict=True))


def test_batches_are_fed_back_that_are_signed_and_no_others():
    with Union() as union:
        batch, _ = union.take(union.ask(0))
        td, before = torch.full((N,), 3.0), union.leaves()
        for unsigned in (batch, dict(batch), {"key": batch["key"]}, {}):
            assert union.native.feed_back(unsigned, td, NONCE) is None
        batch.source = NONCE + 1
        assert union.native.feed_back(batch, td, NONCE) is None
        union.local.settle()
        assert all((a == b).all() for a, b in zip(before, union.leaves(), strict=True))
        batch.source = NONCE
        for _, _, reply in union.native.feed_back(batch, td, NONCE):
            assert reply.wait(int(SECONDS * 1e9))
            assert reply.is_well
        union.local.settle()
        fed = {tuple(item) for item in torch.stack([batch["home"], batch["index"]], 1).tolist()}
        for home, leaves in enumerate(union.leaves()):
            assert {(home, int(i)) for i in np.flatnonzero(leaves == 3)} == {item for item in fed if item[0] == home}


def test_what_shards_have_said_is_told_once():
    with Union() as union:
        for step in range(3):
            union.take(union.ask(step))
        reports = {number: read_report(head) for number, head in union.native.said()}
        assert {number: report.stats.size for number, report in reports.items()} == {1: 20, 2: 80}
        assert union.native.said() == []


def test_nothing_is_written_to_a_batch_that_was_given_up():
    with Union(native=False) as union:
        held, go_on = threading.Event(), threading.Event()

        def before(number):
            held.set()
            go_on.wait(SECONDS)

        union.take(union.ask(0))
        union.before = before
        place = union.layout.new_batch(N)
        draws = _C.DrawsHere(union.local.segment)
        draw, _ = union.ask(1, draws, place)
        assert held.wait(SECONDS)
        draw.abandon()
        for tensor in union.layout.tensors(place):
            tensor.fill_(3)
        go_on.set()
        union.before = lambda number: None
        assert union.take(union.ask(2))[1]
        assert all((tensor == 3).all() for tensor in union.layout.tensors(place))


def test_a_server_that_ends_costs_its_batches_and_says_so():
    with Union(native=False) as union:
        union.take(union.ask(0))
        held = threading.Event()
        union.before = lambda number: held.wait(SECONDS)
        draw, _ = asked = union.ask(1)
        union.links[2][1].close()
        held.set()
        assert not union.take(asked)[1]
        replies = dict(union.native.replies(draw))
        assert "closed" in replies[2].lost
        assert not replies[1].lost
        assert union.ask(2) is None
        before = union.leaves()
        assert union.native.feed_back(torch.arange(9), torch.ones(9), NONCE) is None
        assert all((a == b).all() for a, b in zip(before, union.leaves(), strict=True))


def test_batches_under_way_may_become_garbage_at_any_time():
    with Union() as union:
        draws = _C.DrawsHere(union.local.segment)
        for step in range(300):
            if draws.is_closed:  # a batch that ended has taken those behind it with it
                draws = _C.DrawsHere(union.local.segment)
            asked = union.ask(step, draws if step % 2 else None)
            if step % 3 == 0:
                del asked
            elif step % 7 == 0:
                draws.close()
            else:
                asked[0].wait(0)
        draws.close()
        assert union.take(union.ask(301))[1]


def test_several_threads_draw_and_feed_back():
    with Union() as union:
        union.take(union.ask(0))
        failures = []

        def work(k):
            try:
                for step in range(60):
                    draw, batch = union.ask(1000 * k + step)
                    while not draw.wait(10**9):
                        pass
                    if draw.is_made:
                        assert (batch["key"] == (batch["home"] << KEY_BITS) + batch["index"]).all()
                        union.native.feed_back(batch["key"], batch["weight"], NONCE)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert not failures


def test_answers_that_nobody_waits_for_are_taken_in_while_the_learner_computes():
    with Union() as union:
        for step in range(4):
            union.take(union.ask(step))
            time.sleep(0.01)  # as if it computed: from now on a thread does what can wait
        draw, _ = union.ask(5, _C.DrawsHere(union.local.segment))
        eventually(lambda: draw.is_there)
        assert draw.wait(0)
        assert draw.is_made


def test_it_is_refused_where_there_is_nothing_to_draw_from():
    with Union() as union, contextlib.ExitStack() as refused:
        refused.enter_context(pytest.raises(ValueError, match="a shard is nowhere"))
        _C.UnionShards(union.exchange, [(0, None)], None, 1.0, None)
    with pytest.raises(ValueError, match="no shards"):
        _C.UnionShards(_C.Exchange(), [], None, 1.0, None)


def test_the_items_of_the_only_shard_become_the_batch():
    with Union(sizes=(50,), here=None) as union:
        leaves, sizes = union.leaves(), union.layout.item_sizes
        for step in range(20):
            draw, batch = union.native.draw(N, 0.5, union.sampler.weights, 7, 0, step, 1.0, None, sizes, None)
            assert batch is None
            assert union.take((draw, None)) == (None, True)
            assert draw.block is draw.block
            batch = union.layout.batch_over(draw.block, N)
            assert_is_of(batch, leaves)
            keys = batch["key"]
            draw.abandon()
            del draw
            union.native.feed_back(keys, torch.ones(N), NONCE)[0][2].wait(int(SECONDS * 1e9))
            leaves = union.leaves()
            np.testing.assert_allclose(leaves[0][batch["index"].numpy()], 1.0, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(50, 20), (0,)])
def test_without_memory_no_batch_is_made_of_several_shards_or_of_none_that_has_items(sizes):
    with Union(sizes=sizes, here=None) as union:
        given = N, 0.5, union.sampler.weights, 7, 0, 0, 1.0, None, union.layout.item_sizes, None
        draw, _ = union.native.draw(*given)
        assert union.take((draw, None)) == (None, False)
        assert draw.block is None
        with pytest.raises(RuntimeError, match="no memory of its own"):
            draw.make([((1.0, 1, 1.0, 0.0), N, None, 0)])


def test_a_batch_that_is_given_up_before_it_is_taken_is_none():
    with Union(sizes=(50,), here=None) as union:
        given = N, 0.5, union.sampler.weights, 7, 0, 0, 1.0, None, union.layout.item_sizes, None
        draw, _ = union.native.draw(*given)
        assert draw.wait(int(SECONDS * 1e9))
        draw.abandon()
        assert union.native.take_in(draw)[0] is False
        assert draw.block is None


@pytest.mark.parametrize("sizes", [None, [], [8, 8, 4], [8, 8, 8, 4, 3], [8, "8", 8, 4, 4]])
def test_sizes_that_are_of_no_batch_are_refused(sizes):
    with Union(sizes=(50,), here=None) as union, pytest.raises((ValueError, TypeError)):
        union.native.draw(N, 0.5, union.sampler.weights, 7, 0, 0, 1.0, None, sizes, None)
