"""Generators that are admitted, learners of groups, and who publishes versions: each dies, and the others go on.

A journal in shared memory notes what was written, given and done with. So what must hold afterwards is said without a
look at the queue. Everything here runs in an interpreter whose native module has fault points (`fault_build.py`).
"""

import contextlib
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from signal import SIGSTOP

import numpy as np
import pytest
import torch
from faulty_lives import Fault
from forked import Forked, Hang, shared_counters

import torchreplay as tr
from torchreplay import _C
from torchreplay.segment import waits

SIZE, GROUPS = 3, 2
BATCH = SIZE * GROUPS
LIVES, PROMPTS = 128, 7
"""How many lives a queue has at most, and how many prompts a generator answers."""
ROWS = LIVES * PROMPTS * SIZE
PATIENCE = 30.0
"""Seconds within which all is over."""
SPEC = {
    "prompt": tr.Field((), torch.int64),
    "number": tr.Field((), torch.int64),
    "policy_version": tr.Field((), torch.int64),
    "tokens": tr.Ragged(torch.int32),
}
GENERATOR, LEARNER, SAVER, PUBLISHER = "generator", "learner", "saving learner", "publisher"


def tokens(number):
    return [number * 31 + place for place in range(number * 7 % 40)]


class Rollouts:
    """A queue, the lives around it, and what these have noted. A row's number says its prompt, which one life answers.

    Args:
        commit: "next", of two learners and a process that publishes for them; or "manual", of one that does it all.
        directory: For the model that is saved.
        max_age: Of the admission.
        bound: Whether the sampler has that `max_age`, too.
        late: What becomes of a group that waits long: arguments of `GroupDataset`.
    """

    def __init__(self, commit, directory, max_age=1, bound=False, **late):
        self.at_first = (max_age + 1) * BATCH
        self.max_age = max_age if bound else None
        sampler = tr.Fifo(commit=commit, max_age=self.max_age)
        limiter = tr.Admission(BATCH, max_age)
        self.queue = tr.ReplayBuffer(SPEC, 30, sampler=sampler, limiter=limiter, ragged_bytes=1 << 14)
        self.module = torch.nn.Linear(2, 2)
        self.weights = tr.SharedWeights(self.module)
        self.late = late
        self.file = Path(directory) / f"{id(self)}.pt"
        self.roles = [GENERATOR, GENERATOR, *([SAVER] if commit == "manual" else [PUBLISHER, LEARNER, LEARNER])]
        self.written, self.came, self.done, self.may_come_again = (shared_counters(ROWS) for _ in range(4))
        self.holder = shared_counters(ROWS)  # the life to which a row was given last
        self.short = shared_counters(LIVES * PROMPTS)  # whether a prompt's group had too few members
        self.steps, self.dropped = shared_counters(LIVES), shared_counters(LIVES)  # of each life: two may count at once
        self.published, self.over = shared_counters(1), shared_counters(1)
        self.published_items = shared_counters(1)  # in batches for which a version came
        self.lives, self.deaths = 0, Counter()

    # The lives

    def generate(self, life):
        """Answers prompts, each in a block. Some blocks fail, and others write nothing."""
        module = torch.nn.Linear(2, 2)
        with self.queue.writer() as writer:
            for prompt in range(life * PROMPTS, (life + 1) * PROMPTS):
                with writer.admit(SIZE):
                    self.weights.pull(module, writer=writer)
                    for number in range(prompt * SIZE, (prompt + 1) * SIZE):
                        writer.append(prompt=prompt, number=number, tokens=tokens(number))
                        self.written[number] = 1
                if prompt % 2:
                    with contextlib.suppress(KeyError), writer.admit(SIZE):
                        raise KeyError
                    with writer.admit():
                        pass

    def note(self, life, batch):
        """Notes what came, and returns its numbers."""
        numbers, prompts, group = (batch[name].tolist() for name in ("number", "prompt", "group"))
        values = np.split(batch["tokens"].numpy(), batch.offsets("tokens")[1:-1].tolist())
        for number, prompt, value in zip(numbers, prompts, values, strict=True):
            assert value.tolist() == tokens(number), "a value is torn"
            assert number // SIZE == prompt, "a row is torn"
            assert not self.done[number], "what was done came again"
            self.came[number] += 1
            self.holder[number] = life
        assert batch["age"].min() >= 0
        assert self.max_age is None or batch["age"].max() <= self.max_age
        named = list(dict.fromkeys(zip(group, prompts, strict=True)))
        assert [name for name, _ in named] == list(range(len(named))), "a group has two prompts, or two places"
        for name, prompt in named:
            self.short[prompt] |= group.count(name) < SIZE
        return numbers

    def batches(self):
        return tr.GroupDataset(self.queue, "prompt", SIZE, GROUPS, **{"min_size": 1, **self.late})

    def learn(self, life):
        """Is done with a batch when it asks for the next one."""
        dataset, last = self.batches(), []
        for batch in dataset:
            self.note_done(last)
            last = self.note(life, batch)
            self.steps[life] += 1
        self.note_done(last)
        self.dropped[life] = dataset.counts.dropped_items

    def note_done(self, numbers):
        for number in numbers:
            self.done[number] = 1

    def publish(self, _):
        """Publishes a version for each batch."""
        while not self.over[0]:
            if sum(self.steps) > self.published[0]:
                self.weights.publish(self.module, buffer=self.queue)
                self.published[0] += 1
            time.sleep(0.0005)

    def learn_and_save(self, life):
        """Saves its model after every second batch, and commits then. The next life goes on from the saved model."""
        dataset, seen = self.batches(), []
        if self.file.exists():
            saved = torch.load(self.file)
            dataset.load_state_dict(saved["batches"])
            seen = saved["seen"]

        def save():
            torch.save({"seen": seen, "batches": dataset.state_dict()}, self.file.with_suffix(".new"))
            os.replace(self.file.with_suffix(".new"), self.file)
            self.queue.commit()

        for count, batch in enumerate(dataset, 1):
            numbers = self.note(life, batch)
            seen += numbers
            self.weights.publish(self.module, buffer=self.queue)
            self.published_items[0] += len(numbers)
            if count % 2 == 0:
                save()
        save()
        self.dropped[life] = dataset.counts.dropped_items

    def body(self, role):
        return {GENERATOR: self.generate, LEARNER: self.learn, SAVER: self.learn_and_save, PUBLISHER: self.publish}[
            role
        ]

    # All together

    def play(self, special=None, kills=0, chance=None):
        """Lives all lives, and another one for each that is killed. Returns how many were killed, by role.

        Args:
            special: {role: start} for the first life of a role that `start(body, life)` begins. A second learner comes
                when the first has been killed, or has ended.
            kills: Deaths of random lives at random moments.
            chance: Chooses them.
        """
        special, running = dict(special or {}), {}
        later = [len(self.roles) - 1] if LEARNER in special else []
        deadline = time.monotonic() + PATIENCE
        with contextlib.ExitStack() as stack:
            lease = stack.enter_context(self.queue.expect_writers())

            def begin(place):
                start = special.pop(self.roles[place], Forked)
                running[place] = stack.enter_context(start(self.body(self.roles[place]), self.lives)), self.lives
                self.lives += 1

            for place in range(len(self.roles) - len(later)):
                begin(place)
            while running:
                if time.monotonic() > deadline:
                    raise Hang(f"of {[self.roles[place] for place in running]}: {self.queue.stats()}")
                if kills and chance.random() < 0.2:
                    running[chance.choice([*running])][0].signal(SIGSTOP)
                    kills -= 1
                self.look(running, begin)
                if later and (self.deaths or later[0] - 1 not in running):
                    begin(later.pop())
                left = {self.roles[place] for place in running}
                if GENERATOR not in left:
                    lease.close()
                self.over[0] = left <= {PUBLISHER}
                time.sleep(0.0005)
        return self.deaths

    def look(self, running, begin):
        """Kills each life that has been stopped, and begins another one. Forgets those that have ended."""
        for place, (process, life) in [*running.items()]:
            if is_stopped(process):
                process.kill()
                self.deaths[self.roles[place]] += 1
                self.note_death(life)
                begin(place)
            elif not process.is_running():
                assert process.status == 0, f"a {self.roles[place]} failed"
                del running[place]

    def note_death(self, life):
        """What it held and was not done with comes once more."""
        held = (np.asarray(self.holder) == life) & (np.asarray(self.came) > 0) & (np.asarray(self.done) == 0)
        np.asarray(self.may_come_again)[held] += 1

    def check(self):
        """What must hold when all is over."""
        stats = self.queue.stats()
        written, came, may_come_again = map(np.asarray, (self.written, self.came, self.may_come_again))
        gone = sum(self.dropped) + stats.expired_items
        given = np.flatnonzero(came)
        if SAVER in self.roles:
            given = np.array(torch.load(self.file)["seen"])
            assert len(given) == len({*given}), "a doubled row: the last model has seen it twice"
        else:
            assert (came <= 1 + may_come_again).all(), "a doubled row: nobody had died with it"
            again = came[may_come_again == 1] - 1
            assert self.deaths[LEARNER] != 1 or len({*again}) <= 1, "half a batch was committed"
        missing = len({*np.flatnonzero(written)} - {*given})
        assert missing <= gone, "a lost row"
        if self.max_age is None:  # else what has expired may have been given before, to a learner who died with it
            assert gone <= missing + self.deaths[GENERATOR], "a row was dropped that was given"
        if "timeout" not in self.late:  # which splits groups whose writer takes long
            whole = written.reshape(-1, SIZE).all(1)
            assert not (whole & np.asarray(self.short, bool)).any(), "a split group"
        assert (stats.held_items, stats.drawable, stats.writers) == (0, 0, 0), "a leak"
        assert stats.open_admissions == 0, "admissions leaked"
        assert len(given) - stats.expired_items <= stats.admitted_items, "an item was given and does not count"
        room = stats.admission_limit - stats.admitted_items
        if SAVER in self.roles:
            slack = BATCH * self.queue.policy_version - self.published_items[0]
            assert room <= self.at_first + slack, "what came again does not count again, as its version does"
            unpublished = 0
        else:
            unpublished = BATCH * (sum(self.steps) + self.deaths[LEARNER] - self.published[0])
        assert room >= self.at_first - unpublished, f"admissions leaked: {room} of {self.at_first} - {unpublished}"
        self.check_room(room)

    def check_room(self, room):
        """A writer is admitted for all that the limit leaves, and for nothing more."""
        with self.queue.writer() as writer, contextlib.ExitStack() as blocks:
            for _ in range(room):
                blocks.enter_context(writer.admit(timeout=0))
            with pytest.raises(tr.ReplayTimeout):
                blocks.enter_context(writer.admit(timeout=0))


def is_stopped(process):
    """Whether it has come to its fault, and has been stopped there."""
    if process.status is not None:
        return False
    options = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
    state = os.waitid(os.P_PID, process.pid, options)
    return state is not None and state.si_code == os.CLD_STOPPED


# What is tried

SCENES = {
    "two learners": {"commit": "next"},
    "a learner that saves": {"commit": "manual"},
    "strictly on-policy, late groups given": {"commit": "next", "max_age": 0, "timeout": 0.05},
    "strictly on-policy, late groups dropped": {"commit": "next", "max_age": 0, "timeout": 0.05, "min_size": None},
    "with a bound for stragglers": {"commit": "manual", "bound": True, "timeout": 0.05},
}
EVEN_AT_RANDOM = [scene for scene in SCENES if "dropped" not in scene]
"""Where learners may die, too: what one has dropped is known from that one alone."""


@contextlib.contextmanager
def rollouts(scene):
    """A queue of that scene; its learners end soon when no writer is left."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "RETURN_GRACE", 0.02)
        made = Rollouts(directory=directory, **SCENES[scene])
        with made.queue:
            yield made


def rehearse(scene, role):
    """Returns how often a life in that role comes to each point."""
    names = list(_C.fault_points())
    reached = shared_counters(len(names))

    def counting(body, life):
        before = _C.fault_points()
        body(life)
        for place, (name, count) in enumerate(_C.fault_points().items()):
            reached[place] = count - before[name]

    with rollouts(scene) as made:
        made.play({role: lambda body, life: Forked(counting, body, life)})
        made.check()
    return {name: count for name, count in zip(names, reached, strict=True) if count}


@contextlib.contextmanager
def named(what):
    """Says of an error where it came."""
    try:
        yield
    except BaseException as error:
        error.add_note(what)
        raise


def kill_at(scene, role, fault):
    """Kills the first life in that role when it comes to the fault. Returns how many were killed, by role."""

    def start(body, life):
        def armed():
            fault.arm()
            body(life)

        return Forked(armed)

    with rollouts(scene) as made, named(f"{scene}, with a {role} {fault}"):
        deaths = made.play({role: start})
        made.check()
    return deaths


def kill_at_every_point(scene, times, seed, kinds=("",)):
    """Kills lives of all roles at each point to which they come, so many times. Returns how many, by role.

    Args:
        scene: One of SCENES.
        times: How often at each point, if a life comes there as often.
        seed: Of the choice at which time a life dies there.
        kinds: How the names of the points begin.
    """
    chance, deaths = random.Random(seed), Counter()
    for role in mortal(scene):
        for point, count in rehearse(scene, role).items():
            if point.startswith(tuple(kinds)):
                for nth in {chance.randint(1, count) for _ in range(times)}:
                    deaths += kill_at(scene, role, Fault(point, nth, stop=True))
    return deaths


def kill_at_random(scene, kills, seed):
    """Kills random lives at random moments. Returns how many, by role."""
    with rollouts(scene) as made, named(f"{scene}, seed {seed}"):
        made.late.setdefault("timeout", 0.2)  # or unfinished groups of the dead use up what is admitted
        deaths = made.play(kills=kills, chance=random.Random(seed))
        made.check()
    return deaths


def mortal(scene):
    """The roles of a scene in which lives are killed."""
    roles = [SAVER, GENERATOR] if SCENES[scene]["commit"] == "manual" else [LEARNER, PUBLISHER, GENERATOR]
    return [role for role in roles if scene in EVEN_AT_RANDOM or role != LEARNER]
