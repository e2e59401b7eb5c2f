"""A scene: what happens to a buffer while a process lives in which a fault is tried, and what must hold afterwards.

Everything here runs in an interpreter whose native module has fault points (`fault_build.py`).
"""

import contextlib

from faulty_lives import DIED, INDICES, Fault, faulty, live, live_until_told, lives_of
from forked import Forked, eventually, shared_counters


class Scene:
    """A life in a full buffer that is sound. Every time it is made it goes the same way."""

    LIMITER = None

    def __init__(self, name):
        self.lives = lives_of(name)
        self.buffer = self.lives.buffer(self.LIMITER)
        self.indices = 0

    def new_index(self):
        """The first of some indices that no explorer has had."""
        self.indices += INDICES
        return self.indices - INDICES

    def turn_the_ring(self):
        first = self.new_index()
        for index in range(first, first + 5):
            self.lives.write(self.buffer, index)

    def perform(self, start):
        """`start(body, *args)` starts the process in question. Returns its exit status."""
        self.turn_the_ring()
        len(self.buffer)
        return self.play(start)

    def play(self, start):
        with start(live, self.lives, self.buffer, self.new_index()) as process:
            return process.wait()

    def lose(self, faults):
        """Processes with these faults live beside one that has none. Returns how many died."""
        turns, told = shared_counters(1), shared_counters(1)
        with contextlib.ExitStack() as running:
            survivor = running.enter_context(
                Forked(live_until_told, self.lives, self.buffer, self.new_index(), turns, told)
            )
            victims = [
                running.enter_context(faulty(live, self.lives, self.buffer, self.new_index(), faults=[fault]))
                for fault in faults
            ]
            ends = [victim.wait() for victim in victims]
            assert set(ends) <= {0, DIED}
            later = turns[0] + 2
            eventually(lambda: turns[0] >= later)
            told[0] = 1
            assert survivor.wait() == 0
        return ends.count(DIED)

    def check(self):
        """Nothing is torn, lost or stuck, and the survivors can use all of it."""
        assert self.buffer.stats().writers == 0, "a dead writer counts as alive"
        self.lives.check(self.buffer, self.indices)
        self.lives.check_last(self.buffer, self.indices)


def after_a_death_at(point):
    """What one who died has left, the others have to put right."""

    class AfterADeath(Scene):
        def play(self, start):
            with faulty(live, self.lives, self.buffer, self.new_index(), faults=[Fault(point)]) as dead:
                assert dead.wait() == DIED
            return super().play(start)

    return AfterADeath
