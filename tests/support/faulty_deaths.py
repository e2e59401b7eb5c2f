"""Deaths at fault points: of an explorer in its rows, at every point of every scene, and in pairs.

Everything here runs in an interpreter whose native module has fault points (`fault_build.py`).
"""

import functools
import itertools
import random
import signal

import numpy as np
import torch
from faulty_lives import DIED, INDICES, Fault, await_stop, faulty, lives_of
from faulty_scenes import scenes_of
from forked import Forked, shared_counters
from queue_scenes import DroppedItems
from scene import Scene

import torchreplay as tr
from torchreplay import _C

ROWS_BEGUN = {"append.busy": 1, "append.header": 1, "append.copied": 1, "append.done": 0, "append.committed": 0}


def lose_the_row_being_written(name, seed):
    """In a ring that never turns a death at any step of any row leaves all rows before it."""
    chance, lives = random.Random(seed), lives_of(name)
    for index, (point, begun) in itertools.product(lives.WAYS, ROWS_BEGUN.items()):
        buffer, nth = lives.buffer(capacity=200), chance.randint(1, 16)
        with faulty(lives.write, buffer, index, faults=[Fault(point, nth)]) as explorer:
            assert explorer.wait() == DIED
        assert len(buffer) == nth - begun, point
        lives.check_unbroken(buffer)
        lives.check(buffer, INDICES)


def rehearse(scene):
    """Plays a scene without a fault of ours. Returns how often its process comes to each point."""
    names = list(_C.fault_points())
    reached = shared_counters(len(names))

    def counting(body, args, faults):
        before = _C.fault_points()
        for fault in faults:
            fault.arm()  # which counts from there
        try:
            body(*args)
        finally:
            armed = [fault.arguments[0] for fault in faults]
            for place, (name, count) in enumerate(_C.fault_points().items()):
                reached[place] = count - (0 if name in armed else before[name])

    assert scene.perform(lambda body, *args, faults=(): Forked(counting, body, args, faults)) == 0
    scene.check()
    return {name: count for name, count in zip(names, reached, strict=True) if count}


def rehearse_all(names):
    """Returns the points that the scenes come to, and those there are."""
    reached = {point for name in names for make in scenes_of(name).values() for point in rehearse(make(name))}
    return sorted(reached), sorted(_C.fault_points())


def die_at_every_point(name, everywhere, seed):
    """Plays all scenes with a death at each point that they come to. Returns how many processes died.

    Args:
        name: "rows", or one of VIEWS.
        everywhere: Also at points that a scene before came to.
        seed: Of the choice at which time a process dies there.
    """
    chance, known, deaths = random.Random(seed), set(), 0
    for title, make in scenes_of(name).items():
        reached = rehearse(make(name))
        for point, count in reached.items():
            if everywhere or point not in known:
                # What depends on time may happen less often than in the rehearsal, but it happens.
                if not dies_at(make(name), Fault(point, chance.randint(1, count)), title):
                    assert dies_at(make(name), Fault(point), title), f"{point} was not reached {title}"
                deaths += 1
        known |= set(reached)
    return deaths


def dies_at(scene, fault, title):
    try:
        status = scene.perform(lambda body, *args, faults=(): faulty(body, *args, faults=[*faults, fault]))
        assert status in (0, DIED)
        scene.check()
    except BaseException as error:
        error.add_note(f"{title}, with a process {fault}")
        raise
    return status == DIED


def kill_in_changes_of_the_grid():
    """A learner is killed while the priorities' grid changes: every item has its old priority, or its new one."""
    rows = 1000
    chance = np.random.default_rng(4)
    old, new = (scale * 10.0 ** chance.uniform(-2, 2, rows) for scale in (1.0, 1e12))
    for point in ("tree.leaf", "tree.outgrown", "tree.clamped", "tree.grid", "update.set", "dirty.over"):
        for before, after in ((old, new), (new, old)):
            sampler = tr.Prioritized(1.0, eps=1e-30)
            with tr.ReplayBuffer({"x": tr.Field()}, rows, sampler=sampler, seed=0) as buffer:
                keys = buffer.extend(x=np.zeros(rows), priority=before)
                buffer.update_priorities(keys, torch.from_numpy(before))
                update = functools.partial(buffer.update_priorities, keys, torch.from_numpy(after))
                # Where the large ones come the tree takes no more of them; where they go all are written, and it looks.
                fault = Fault(point, stop=True)
                with faulty(update, faults=[fault]) as learner:
                    if await_stop(learner):
                        learner.kill()
                        assert learner.status == -signal.SIGKILL
                    else:
                        assert (point, after is old) in {("tree.outgrown", True), ("tree.leaf", False)}
                        assert learner.wait() == 0
                leaves = buffer._segment.column(-1).double().numpy()
                assert (np.isclose(leaves, before, rtol=1e-6) | np.isclose(leaves, after, rtol=1e-6)).all(), point
                found = buffer.gather(keys)["probability"].double().numpy()
                np.testing.assert_allclose(found, leaves / leaves.sum(), rtol=1e-5, atol=1e-17, err_msg=point)
                update()
                found = buffer.gather(keys)["probability"].double().numpy()
                np.testing.assert_allclose(found, after / after.sum(), rtol=1e-5, err_msg=point)


def die_where_items_are_dropped():
    """A learner dies each second time that it comes to a step of dropping an item. Returns how many died."""
    reached = rehearse(DroppedItems("rows"))
    points = ("claims.going", "claims.dropped", "claims.lost", "claims.let_go", "claims.ending")
    faults = [Fault(point, nth) for point in points for nth in range(1, reached[point] + 1, 2)]
    return sum(dies_at(DroppedItems("rows"), fault, "where items are dropped") for fault in faults)


def die_in_pairs(name, pairs, seed):
    """Two processes die at random points while another lives on. Returns how many of them died before their end."""
    chance, deaths = random.Random(seed), 0
    points = sorted(rehearse(Scene(name)).items())
    for _ in range(pairs):
        scene = Scene(name)
        faults = [Fault(point, chance.randint(1, count)) for point, count in chance.sample(points, 2)]
        try:
            deaths += scene.lose(faults)
            scene.check()
        except BaseException as error:
            error.add_note(f"with one process {faults[0]}, and another {faults[1]}")
            raise
    return deaths
