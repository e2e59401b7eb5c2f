"""Explorers killed at any instruction, in all ways of writing, alone and in crowds, in tiny rings and large ones, at
work and waiting for the limiter; learners while others draw. Every row that was acknowledged must be there."""

import contextlib
import os
import random
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from acknowledged import WAYS, WIDER, Notes, assert_acknowledged_rows_are_there
from aftermath import ALPHA, BATCH, assert_the_survivor_can_use_all_of_it, learn
from forked import Forked, eventually, shared_counters
from numbered_episodes import LANES, Explorers, spec

import torchreplay as tr

TINY, LARGE = 16, 512
LIMITERS = {
    TINY: tr.SamplesPerInsert(1.0, min_size=16, tolerance=1.0),
    LARGE: tr.SamplesPerInsert(1.0, min_size=128, tolerance=0.5),
}


def matrix(*choices):
    return pytest.mark.parametrize("case", choices, ids=lambda case: " ".join(map(str, case)))


class Scene:
    """Explorers of one way in one buffer, of which some are killed in every round."""

    def __init__(self, way, writers, capacity, limiter, seed):
        self.way, self.chance = WAYS[way], random.Random(seed)
        self.items = self.way.items
        self.buffer = tr.ReplayBuffer(
            spec(WIDER), capacity, view=self.items.view, sampler=tr.Prioritized(ALPHA), limiter=limiter, seed=0
        )
        self.notes = [Notes() for _ in range(writers)]
        self.explorers = Explorers(self.buffer, free=limiter is not None, number=writers, write=self.write)
        self.killed = self.acknowledged = 0
        self.empty = self.found_empty = 0

    def write(self, buffer, index):
        return self.way.write(buffer, index, self.notes[index % len(self.notes)])

    def draw(self, timeout):
        learn(self.buffer, self.items, self.explorers.streams, timeout)

    def kill_some(self):
        victims = self.chance.sample(self.explorers.places, self.chance.randint(1, len(self.notes)))
        self.explorers.kill_and_replace(*victims)
        self.killed += len(victims)
        return victims

    def look(self, writers):
        """While nobody writes."""
        eventually(lambda: self.buffer.stats().writers == writers)
        most_lost = self.killed * self.way.most_rows
        acknowledged, empty = assert_acknowledged_rows_are_there(self.buffer, self.notes, most_lost)
        self.acknowledged += acknowledged
        self.found_empty += max(0, empty - self.empty)
        self.empty = empty

    def end(self):
        assert_the_survivor_can_use_all_of_it(self.buffer, self.items, self.explorers.streams, self.write)


def kill_writing(scene):
    """Lets all write some rows, kills some on the way, and looks when the others have written theirs."""
    explorers, chance = scene.explorers, scene.chance
    for place in explorers.places:
        explorers.admit(place, chance.randrange(1, 60))
    chosen = chance.choice(explorers.places)
    explorers.await_rows_of(chosen, rows=chance.randrange(explorers.admitted[chosen]))
    victims = scene.kill_some()
    explorers.await_pause()
    scene.look(writers=len(explorers.places) - len(victims))
    with contextlib.suppress(tr.ReplayTimeout):  # sometimes there is no complete item
        scene.draw(timeout=0)


def sleeps(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def await_all_wait(scene, probe):
    """Returns when every explorer waits for the limiter, and none has a row under way."""

    def all_sleep():
        return all(sleeps(explorer.pid) for explorer in scene.explorers.running)

    def rests():
        rows = scene.buffer.stats().rows_written
        if not all_sleep():
            return False
        len(scene.buffer)  # rows that were lost, and rows that are no items, make room for others
        return not probe._admitted() and scene.buffer.stats().rows_written == rows and all_sleep()

    eventually(rests, interval=0.001)


def kill_waiting(scene, probe):
    """Kills some while they wait for the limiter, or just after a draw has let them go on; the others must go on."""
    inserted = scene.buffer.stats().inserted
    for _ in range(scene.chance.randrange(1, 3)):
        scene.draw(timeout=60)
    if scene.chance.random() < 0.5:
        await_all_wait(scene, probe)
    scene.kill_some()
    await_all_wait(scene, probe)
    scene.look(writers=len(scene.explorers.places) + 1)
    assert scene.buffer.stats().inserted > inserted, "hang: the others were not let on"


def kill_explorers(case, kills, seed, tally):
    way, writers, capacity, limited = case
    scene = Scene(way, writers, capacity, LIMITERS[capacity] if limited else None, seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(scene.explorers)
        act = partial(kill_waiting, probe=stack.enter_context(scene.buffer.writer())) if limited else kill_writing
        while scene.killed < kills:
            act(scene)
    scene.end()
    tally("explorers killed", scene.killed)
    tally("acknowledged rows looked for", scene.acknowledged)
    tally("slots that deaths in the middle of a row left empty", scene.found_empty)


EXPLORERS = list(product(WAYS, (1, 2, 4), (TINY, LARGE), ("", "limited")))


@matrix(*EXPLORERS[::7])
def test_sigkill_of_explorers_loses_no_row_but_the_one_being_written(case, tally):
    kill_explorers(case, 4, seed=1, tally=tally)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@matrix(*EXPLORERS)
def test_sigkill_of_300_explorers_loses_no_row_but_the_one_being_written(case, tally):
    kill_explorers(case, int(os.environ.get("TORCHREPLAY_SOAK_KILLS", 300)), seed=2, tally=tally)


# Learners


CHECK_EVERY = 8  # batches: most deaths are to happen in drawing and feeding back


def learn_for_ever(buffer, items, place, batches):
    while True:
        for _ in range(CHECK_EVERY - 1):
            batch = buffer.sample(BATCH, timeout=60)
            buffer.update_priorities(batch, batch["probability"])
            batches[place] += 1
        learn(buffer, items, LANES)
        batches[place] += 1


def kill_learners(case, kills, seed, tally):
    """Some of several die while an explorer laps the ring; after each death every other one draws again."""
    way, number, capacity = case
    scene, chance = Scene(way, 1, capacity, None, seed), random.Random(seed)
    scene.explorers.admit(0, 2**62)
    batches = shared_counters(number)
    killed = 0
    with scene.explorers, contextlib.ExitStack() as stack:

        def start(place):
            return stack.enter_context(Forked(learn_for_ever, scene.buffer, scene.items, place, batches))

        def await_batches(place, n):
            enough = batches[place] + n
            eventually(lambda: batches[place] >= enough or not learners[place].is_running(), interval=0)
            assert learners[place].is_running(), "a learner failed"

        learners = [start(place) for place in range(number)]
        while killed < kills:
            victims = chance.sample(range(number), chance.randrange(1, number))
            for place in victims:
                await_batches(place, chance.randrange(1, 30))
                learners[place].kill()
            for place in set(range(number)) - set(victims):
                await_batches(place, 1)
            for place in victims:
                learners[place] = start(place)
            killed += len(victims)
        for place in range(number):
            await_batches(place, CHECK_EVERY)
        assert scene.buffer.stats().learners == number, "a dead learner counts as alive"
    scene.end()
    tally("learners killed", killed)
    tally("rows checked", sum(batches) // CHECK_EVERY * BATCH)


LEARNERS = list(product(("rows", "steps"), (2, 3), (64, LARGE)))


@pytest.mark.slow
@matrix(*LEARNERS[::3])
def test_sigkill_of_learners_lets_the_others_draw_on(case, tally):
    kill_learners(case, 4, seed=3, tally=tally)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@matrix(*LEARNERS)
def test_sigkill_of_300_learners_lets_the_others_draw_on(case, tally):
    kill_learners(case, int(os.environ.get("TORCHREPLAY_SOAK_KILLS", 300)), seed=4, tally=tally)
