"""A ring of linked rows in plain Python: lists of rows, and everything else computed from them anew at every question.

It shares no code with torchreplay. Values are NumPy arrays under flat names such as `obs/goal`.
"""

import numpy as np

EPS = 1e-6


class Row:
    """One observation with what led to it; `stream` lists the rows of its lane, `step` counts within the episode."""

    def __init__(self, key, stream, values, first, ends, priority):
        self.key = key
        self.stream = stream
        self.place = len(stream)
        self.step = 0 if first else stream[-1].step + 1
        self.values = values
        self.ends = ends
        self.priority = None if priority is None else abs(priority)

    def later(self, most):
        """The next rows of its episode, as far as they were written."""
        rows = []
        for row in self.stream[self.place + 1 : self.place + 1 + most]:
            if row.step == 0:
                break
            rows.append(row)
        return rows

    def earlier(self):
        """The rows of its episode before it, oldest first."""
        return self.stream[self.place - self.step : self.place]


def are(name, observation):
    """Whether the field `name` is one of the observation, or lies within one."""
    return any(name == one or name.startswith(one + "/") for one in observation)


class Transitions:
    """n-step transitions, `stack` frames of a field on a new leading axis; `discount` names that of a step."""

    def __init__(self, n_step=1, gamma=0.99, observation=("obs",), stack=None, discount=None):
        self.discount = discount
        self.n_step = n_step
        self.gamma = gamma
        self.observation = observation
        self.stack = stack or {}
        self.frames = max(self.stack.values(), default=1)
        self.span = n_step + self.frames

    def steps(self, anchor):
        return anchor.later(self.n_step)

    def is_complete(self, anchor):
        steps = self.steps(anchor)
        return len(steps) == self.n_step or (len(steps) > 0 and steps[-1].ends)

    def needs(self, anchor):
        """The rows that must be held for the item to be drawn."""
        frames = [*anchor.earlier(), anchor][-self.frames :]
        return frames + self.steps(anchor)

    def initial_priority(self, anchor):
        return self.steps(anchor)[-1].priority

    def item(self, anchor):
        steps = self.steps(anchor)
        item = {}
        for name, value in steps[0].values.items():
            if are(name, self.observation):
                item[name] = self._observed(anchor, name)
                item["next_" + name] = self._observed(steps[-1], name)
            elif name != self.discount:
                item[name] = value
        returned, discount = 0.0, 1.0
        for row in reversed(steps):
            factor = self.gamma * (1.0 if self.discount is None else float(row.values[self.discount]))
            returned = np.float64(row.values["reward"]) + factor * returned
            discount *= factor
        item["reward"] = np.asarray(returned, steps[0].values["reward"].dtype)
        for name in ("terminated", "truncated"):
            item[name] = steps[-1].values[name]
        item["discount"] = np.array(0.0 if item["terminated"] else discount, np.float32)
        return item

    def _observed(self, row, name):
        if name not in self.stack:
            return row.values[name]
        frames = [*row.earlier(), row]
        while len(frames) < self.stack[name]:
            frames.insert(0, frames[0])
        return np.stack([frame.values[name] for frame in frames[-self.stack[name] :]])


class Sequences:
    """Windows of `burn_in + length` steps of one episode, padded with zeros beyond its end, or not `partial`."""

    def __init__(self, length, stride=None, burn_in=0, initial=(), observation=("obs",), partial=True):
        self.partial = partial
        self.stride = length if stride is None else stride
        self.burn_in = burn_in
        self.window = burn_in + length
        self.initial = initial
        self.observation = observation
        self.span = self.window + 1

    def steps(self, anchor):
        return anchor.later(self.window)

    def is_complete(self, anchor):
        steps = self.steps(anchor)
        ended = self.partial and len(steps) > 0 and steps[-1].ends
        return anchor.step % self.stride == 0 and (len(steps) == self.window or (ended and len(steps) > self.burn_in))

    def needs(self, anchor):
        return [anchor, *self.steps(anchor)]

    def initial_priority(self, anchor):
        given = [row.priority for row in self.steps(anchor) if row.priority is not None]
        return max(given, default=None)

    def item(self, anchor):
        steps = self.steps(anchor)
        item = {
            "mask": np.zeros(self.window, bool),
            "is_first": np.zeros(self.window, bool),
        }
        for t, row in enumerate([anchor, *steps][: self.window]):
            item["is_first"][t] = row.step == 0
        for t, row in enumerate(steps):
            item["mask"][t] = row.step != 0
        for name, value in anchor.values.items():
            if are(name, self.observation):
                item[name] = self._padded([anchor, *steps], name, self.window + 1)
            elif name in self.initial:
                item[name] = steps[0].values[name]
            else:
                item[name] = self._padded(steps, name, self.window)
            assert item[name].dtype == value.dtype
        return item

    def _padded(self, rows, name, length):
        values = [row.values[name] for row in rows]
        values += [np.zeros_like(values[0])] * (length - len(rows))
        return np.stack(values)


class SequencesAcrossEpisodes(Sequences):
    """Windows from every row, which run on into the stream's next episodes."""

    def steps(self, anchor):
        return anchor.stream[anchor.place + 1 : anchor.place + 1 + self.window]

    def is_complete(self, anchor):
        return len(self.steps(anchor)) == self.window


class Ring:
    """Rows under keys 0, 1, 2, ...; a row is held until another takes its slot, key % capacity."""

    def __init__(self, fields, capacity, view, alpha=0.6, initial="max_seen"):
        self.initial = initial  # "max_seen", "max_held" or a number
        self.fields = fields  # name -> (shape, dtype)
        self.capacity = capacity
        self.view = view
        self.alpha = alpha  # None: uniform sampling
        self.rows = []
        self.seen = []  # the rows held at the last look
        self.leaves = {}  # key -> priority of every item that could be drawn then
        self.largest = 1.0
        self.completed = 0  # rows written when the last item that a learner saw was completed
        self.inserted = self.updated = self.stale = self.unready = 0

    def write(self, stream, values, priority=None):
        """Writes a row of `stream`: one that starts an episode if only observations are given. Returns its key."""
        first = "reward" not in values
        complete = {}
        for name, (shape, dtype) in self.fields.items():
            complete[name] = np.asarray(values[name], dtype) if name in values else np.zeros(shape, dtype)
            assert complete[name].shape == shape
        ends = bool(complete["terminated"] or complete["truncated"])
        row = Row(len(self.rows), stream, complete, first, ends, priority)
        stream.append(row)
        self.rows.append(row)
        return row.key

    def look(self):
        """What a learner sees, and when: rows overwritten before it looks never were.

        Items that appear at one look start with the largest priority of before, so a test that gives larger ones looks
        after every row. That of the items held is the largest of those that the look leaves.
        """
        self.seen = self.rows[-self.capacity :]
        held = set(self.seen)
        anchors = [row for row in self.seen if self.view.is_complete(row) and held.issuperset(self.view.needs(row))]
        given = {row.key: self.view.initial_priority(row) for row in anchors if row.key not in self.leaves}
        kept = [self.leaves[row.key] for row in anchors if row.key in self.leaves]
        new = {key: self._start(kept) if raw is None else self.leaf(raw) for key, raw in given.items()}
        self.leaves = {row.key: new.get(row.key) or self.leaves[row.key] for row in anchors}
        self.largest = max([self.largest, *(raw for raw in given.values() if raw is not None)])
        self.inserted += len(new)
        self.completed = max([self.completed, *(self.view.needs(self.rows[key])[-1].key + 1 for key in new)])

    def _start(self, kept):
        if self.initial == "max_held":
            return max(kept, default=self.leaf(1.0))
        return self.leaf(self.largest if self.initial == "max_seen" else self.initial)

    def leaf(self, raw):
        """(|raw| + eps)^alpha, Schaul et al. 2016, section 3.3."""
        return 1.0 if self.alpha is None else (abs(raw) + EPS) ** self.alpha

    def update(self, keys, errors):
        """Feeds TD errors back, looking first."""
        self.look()
        for key, error in zip(keys, errors, strict=True):
            if key < self.seen[0].key:
                self.stale += 1
            elif key not in self.leaves:
                self.unready += 1
            else:
                self.leaves[key] = self.leaf(error)
                self.largest = max(self.largest, abs(error))
                self.updated += 1

    def items(self):
        """The item of every drawable anchor by its key, as of the last look."""
        return {key: self.view.item(self.rows[key]) for key in self.leaves}


class Lanes:
    """What `writer(num_envs=n, autoreset=...)` writes: a stream a lane, rows in the order of the lanes.

    Values are a list with a dict for each lane. A writer without lanes is one of a single lane that is told to reset.
    """

    def __init__(self, ring, lanes=1, autoreset="disabled"):
        self.ring = ring
        self.autoreset = autoreset
        self.streams = [[] for _ in range(lanes)]

    def must_reset(self, lane):
        stream = self.streams[lane]
        return not stream or (stream[-1].ends and self.autoreset != "next_step")

    def begins(self, lane):
        """Whether the next step only brings an episode's first observation: no reward, no flag."""
        stream = self.streams[lane]
        return self.autoreset == "next_step" and bool(stream) and stream[-1].ends

    def reset(self, observations, mask=None):
        keys = []
        for lane, stream in enumerate(self.streams):
            written = mask is None or mask[lane]
            keys.append(self.ring.write(stream, observations[lane]) if written else -1)
        return keys

    def step(self, values, observed, final=None, priorities=None):
        """`values` has the fields but the observation, `observed` that; `final` that of the episode's end."""
        keys = []
        for lane, stream in enumerate(self.streams):
            assert not self.must_reset(lane)
            priority = priorities[lane] if priorities else None
            if self.begins(lane):
                keys.append(self.ring.write(stream, observed[lane]))
                continue
            ends = values[lane]["terminated"] or values[lane]["truncated"]
            if self.autoreset == "same_step" and ends:
                keys.append(self.ring.write(stream, values[lane] | final[lane], priority))
                self.ring.write(stream, observed[lane])
            else:
                keys.append(self.ring.write(stream, values[lane] | observed[lane], priority))
        return keys
