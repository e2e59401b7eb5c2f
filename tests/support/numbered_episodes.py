"""Episodes in which every value says which stream, episode and step it is of, and four ways of writing them for ever.

A row's code is (stream * EPISODES + episode) * STEPS + step; an episode's number is its code without the step.
"""

import itertools
import signal

import numpy as np
from forked import Forked, eventually, shared_counters

import torchreplay as tr

EPISODES = 2**20  # of a stream
STEPS = 2**6  # more than any episode has
LANES = 4  # streams that a writer may have
WIDE = 768  # of int64: 6 KiB, which lies in an array of its own and takes long enough to be killed in
NARROW = 4  # the same field where rows are to be written fast


def spec(width=WIDE):
    return {
        "obs": {
            "code": tr.Field((), np.int64),
            "wide": tr.Field((width,), np.int64),
            "achieved": tr.Field((2,), np.int64),
            "desired": tr.Field((2,), np.int64),
        },
        "action": tr.Field((), np.int64),
        "reward": tr.Field((), np.float64),
        "terminated": tr.Field((), np.bool_),
        "truncated": tr.Field((), np.bool_),
        "bytes": tr.Field((24,), np.uint8),
    }


TERMINATED, TRUNCATED, CUT = range(3)  # how episodes end; CUT: by the next reset, without a flag


def number_of(stream, episode=0):
    return stream * EPISODES + episode


def length_of(number):
    """Steps of an episode, 1 to 24."""
    return 1 + number * 7919 % 1009 % 24


def ending_of(number):
    return number * 7919 % 1009 // 24 % 3


def successor(codes):
    """The code of the stream's next row, in the next episode after an episode's last row."""
    number, step = codes // STEPS, codes % STEPS
    return np.where(step < length_of(number), codes + 1, (number + 1) * STEPS)


def assert_streams_are_unbroken(codes):
    """The rows of every stream are its first ones."""
    streams = codes // STEPS // EPISODES
    for stream in np.unique(streams):
        expected = stream * EPISODES * STEPS
        for code in np.sort(codes[streams == stream]):
            assert code == expected
            expected = successor(code)


def observed(codes, width=WIDE):
    """The observations of rows."""
    return {**numbers(codes), "wide": wide(codes, width)}


def wide(codes, width):
    return np.asarray(codes)[..., None] + np.arange(width)


def numbers(codes):
    """The short fields of observations."""
    codes = np.asarray(codes)
    number = codes // STEPS
    return {
        "code": codes,
        "achieved": np.stack([codes, -codes], -1),
        "desired": np.stack([-number, number + 1], -1),
    }


def taken(codes):
    """What else the rows of steps hold: what led to their observations."""
    codes = np.asarray(codes)
    number, step = codes // STEPS, codes % STEPS
    ends = step == length_of(number)
    return {
        "action": codes,
        "reward": codes.astype(np.float64),
        "terminated": ends & (ending_of(number) == TERMINATED),
        "truncated": ends & (ending_of(number) == TRUNCATED),
        "bytes": np.repeat(codes[..., None] % 251, 24, -1).astype(np.uint8),
    }


def episode_of(number, width=WIDE):
    """All rows of an episode, as `extend` takes them."""
    codes = number * STEPS + np.arange(length_of(number) + 1)
    return {"obs": observed(codes, width), **taken(codes[1:]), "priority": np.linspace(0.1, 2.0, len(codes) - 1)}


# Ways of writing: generators that write the streams' rows for ever, and say after every call how many.


def row_by_row(writer, stream):
    """For `Rows()`: the same values in rows that nothing links."""
    for code in itertools.count(number_of(stream) * STEPS):
        writer.append(obs=observed(code), **taken(code))
        yield 1


def step_by_step(writer, stream):
    for number in itertools.count(number_of(stream)):
        writer.reset(obs=observed(number * STEPS))
        yield 1
        for step in range(1, length_of(number) + 1):
            code = number * STEPS + step
            writer.step(obs=observed(code), **taken(code), priority=None if step % 3 else 1 + code % 5)
            yield 1


def whole_episodes(writer, stream):
    for number in itertools.count(number_of(stream)):
        yield len(writer.extend(**episode_of(number)))


def in_lanes(writer, streams, autoreset):
    """What a vector environment does. Lanes whose episodes have no end are reset by hand."""
    number, step = number_of(streams), np.zeros_like(streams)
    writer.reset(obs=observed(number * STEPS))
    yield len(streams)
    while True:
        over = step == length_of(number)
        by_hand = over & ((ending_of(number) == CUT) | (autoreset == "disabled"))
        number, step = number + over, np.where(over, 0, step + 1)
        if by_hand.any():
            writer.reset(obs=observed(number * STEPS), mask=by_hand)
            yield int(by_hand.sum())
            step += by_hand
        codes = number * STEPS + step
        values, final, rows = taken(codes), None, len(streams)
        if autoreset == "same_step":
            final = observed(codes)
            ends = values["terminated"] | values["truncated"]
            number, step = number + ends, np.where(ends, 0, step)
            rows += int(ends.sum())
        writer.step(obs=observed(number * STEPS + step), **values, final_obs=final)
        yield rows


def writing(buffer, index):
    """Writes for ever as explorer `index` does, in streams of its own; yields the rows of every call."""
    stream, kind = index * LANES, index % 4
    lanes, autoreset = {2: (3, "next_step"), 3: (2, "disabled" if index // 4 % 2 else "same_step")}.get(
        kind, (None, None)
    )
    with buffer.writer(lanes, autoreset) if lanes else buffer.writer() as writer:
        if lanes:
            yield from in_lanes(writer, stream + np.arange(lanes), autoreset)
        else:
            yield from (whole_episodes if kind else step_by_step)(writer, stream)


def write_calls(buffer, index, calls):
    """Makes so many calls as explorer `index`, and closes the writer; returns the rows written."""
    return sum(itertools.islice(writing(buffer, index), calls))


def write_for_ever(calls, place, written, admitted):
    """What an explorer's process does: `written[place]` counts its rows, `admitted[place]` says when it has to wait."""
    while True:
        eventually(lambda: written[place] < admitted[place], timeout=600, interval=0.001)
        written[place] += next(calls)


class Explorers:
    """Processes that write until they are killed or the buffer is stopped: four of them, in the four ways.

    Args:
        buffer: What they write to.
        first: Index of the first explorer, a multiple of their number; every later one has an index of its own.
        free: They write all the time, and not only when they are admitted.
        number: How many they are.
        write: Writes for ever as the explorer of an index does, and yields the rows of every call.
    """

    def __init__(self, buffer, first=0, free=True, number=4, write=writing):
        self.buffer = buffer
        self.free = free
        self.write = write
        self.places = range(number)
        self.written, self.admitted = shared_counters(number), shared_counters(number)
        self._next = [first + place for place in self.places]
        self.running = [self._start(place) for place in self.places]

    def _start(self, place):
        index = self._next[place]
        self._next[place] += len(self.places)
        self.written[place] = 0
        self.admitted[place] = 2**62 if self.free else 0
        return Forked(write_for_ever, self.write(self.buffer, index), place, self.written, self.admitted)

    @property
    def streams(self):
        """The explorers started so far have streams below this."""
        return max(self._next) * LANES

    def admit(self, place, rows):
        """Lets an explorer go on until it has written so many rows more."""
        self.admitted[place] = self.written[place] + rows

    def await_rows_of(self, *places, rows=1):
        eventually(lambda: all(self.written[place] >= rows for place in places), interval=0)

    def await_pause(self):
        """Returns when all have written what they may."""
        eventually(lambda: all(self.written[place] >= self.admitted[place] for place in self.places))

    def kill_and_replace(self, *places):
        for place in places:
            self.running[place].signal(signal.SIGKILL)
        for place in places:
            self.running[place].kill()
            self.running[place] = self._start(place)

    def stop(self):
        """Stops the buffer, and waits until every explorer has seen it."""
        self.buffer.stop()
        assert [explorer.wait() for explorer in self.running] == [0] * len(self.places)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for explorer in self.running:
            explorer.kill()
