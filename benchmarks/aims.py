"""What torchreplay sets out to reach, by section and line.

Absolute figures are for two cores of a shared machine and say what to aim at; ratios are what counts, because they are
taken within one run.
"""

from collections.abc import Mapping, Sequence

from benchmarks.line import Aim

LEARNERS = "small", "wide", "atari", "wide, busy device"
"""On a CUDA device."""

AIMS: Mapping[tuple[str, str], Sequence[Aim]] = {
    ("small", "append one row"): (Aim(0.4), Aim(30, over="cpprb")),
    ("small", "extend by 50 rows"): (Aim(3.0), Aim(5, over="cpprb")),
    ("small", "sample 256"): (Aim(25.0),),
    ("small", "update 256"): (Aim(6.0),),
    ("small", "sample + update 512"): (Aim(10, over="cpprb"),),
    ("tree", "sample 256 of 1,000,000"): (Aim(12.0),),
    ("tree", "update 256 of 1,000,000"): (Aim(9.0),),
    ("contest", "batches, chunks of 64"): (Aim(10, over="cpprb"),),
    ("contest", "rows, chunks of 64"): (Aim(5, over="cpprb"),),
    ("queue", "items of 1 KB"): (Aim(1e6), Aim(8, over="echo")),
    ("queue", "items of 140 KB"): (Aim(1.3, over="echo"),),
    ("queue", "... of memcpy"): (Aim(0.6),),
    ("queue", "sample 256 of 1,000,000 and give it back"): (Aim(1 / 1.5, over="prioritized, with update"),),
    ("ragged", "memory, in payloads"): (Aim(1.1),),
    ("ragged", "rollouts: put and get"): (Aim(3.0), Aim(10, over="Ray actor")),
    ("ragged", "... of two copies by memcpy"): (Aim(0.7),),
    **{("ragged", f"0 to 64 bytes: {what}"): (Aim(1e6),) for what in ("append", "extend by 256", "sample 256")},
    ("overload", "4: batches"): (Aim(1000.0),),
    ("overload", "16: batches"): (Aim(200.0), Aim(10, over="cpprb")),
    ("overload", "16: rows"): (Aim(4e6),),
    ("overload", "16: worst"): (Aim(500.0),),
    ("overload", "16: stale"): (Aim(20.0),),
    ("overload", "16, episodes: batches"): (Aim(100.0),),
    ("overload", "16, vector writers: batches"): (Aim(100.0),),
    ("kills", "explorer killed: explorer hangs"): (Aim(0.0),),
    ("kills", "explorer killed: learner hangs"): (Aim(0.0),),
    ("kills", "learner killed: explorer hangs"): (Aim(0.0),),
    ("kills", "learner killed: learner hangs"): (Aim(0.0),),
    ("small", "sample 256, without replacement"): (Aim(1 / 1.2, over="with replacement"),),
    ("rewrite", "... times a gather of them"): (Aim(2.0),),
    ("rewrite", "... as fast as without"): (Aim(0.5),),
    ("gather", "fraction of memcpy, reused"): (Aim(0.9),),
    ("gather", "fraction of memcpy, fresh"): (Aim(0.9),),
    ("gather", "sample 256, two threads"): (Aim(1.6, over="one thread"),),
    ("gather", "wide rows, fraction of index_select and tree"): (Aim(0.9),),
    ("trajectories", "step"): (Aim(0.5),),
    ("trajectories", "Sequences(8) x 32 of 100,000"): (Aim(40.0),),
    ("trajectories", "Sequences(8) x 32 of 1,000,000"): (Aim(40.0),),
    ("trajectories", "... ten times as many rows"): (Aim(1.5),),
    ("trajectories", "frames, bytes a transition"): (Aim(7200.0),),
    ("trajectories", "frames, sample 256, 3-step"): (Aim(1.0, over="cpprb"),),
    ("trajectories", "frames, fraction of memcpy, reused"): (Aim(0.8),),
    ("trajectories", "frames, fraction of memcpy, fresh"): (Aim(0.8),),
    ("memory", "frames, stored once"): (Aim(7200.0),),
    **{
        ("recovery", f"{view}, died {what}"): (Aim(10.0),)
        for view in ("Rows", "Transitions")
        for what in ("absorbing", "updating 256")
    },
    ("call", "sample + update 256"): (Aim(30.0),),
    ("loader", "overhead over a no-op dataset, steps of 1 ms"): (Aim(15.0),),
    ("loader", "waits: asks when none is ready, steps of 1 ms, an explorer writes"): (Aim(1.0),),
    ("loader", "PriorityFeedback inside Lightning"): (Aim(10.0),),
    ("gpu", "host to device, fraction"): (Aim(0.85),),
    **{("gpu", f"{name}: steps, fraction"): (Aim(0.97),) for name in LEARNERS},
    **{("gpu", f"{name}: waits a step"): (Aim(0.0),) for name in LEARNERS},
    ("upkeep", "... times as long as without"): (Aim(1.2),),
    ("upkeep", "attach"): (Aim(2000.0),),
    ("upkeep", "stats()"): (Aim(10.0),),
    ("imports", "import, after torch"): (Aim(45.0),),
    ("ray", "rows, one at a time"): (Aim(20, over="Ray actor"),),
    ("ray", "rows, chunks of 50"): (Aim(5, over="Ray actor"),),
    ("ray", "batches of 512"): (Aim(3, over="Ray actor"),),
    ("ray", "rows, two explorers of a pool"): (Aim(0.9, over="plain processes"),),
    ("shards", "batches of 512, two nodes"): (Aim(0.8, over="a buffer each"),),
    **{
        ("shards", f"{size}, one node: {way}{feedback}"): (Aim(1 / 1.3, over="ReplayBuffer"),)
        for size in ("small rows, 256", "Atari rows, 64")
        for way in ("sample", "prefetch=2")
        for feedback in ("", ", feedback")
    },
    **{
        ("shards", f"Atari rows, 64, two nodes: prefetch=2{feedback}"): (Aim(4 * 107.0), Aim(0.5, over="plain TCP"))
        for feedback in ("", ", feedback")
    },
    ("shards", "small rows, 256, three nodes: prefetch=2"): (Aim(1000.0),),
    ("shards", "small rows, 256, three nodes: prefetch=2, feedback"): (Aim(800.0),),
    **{
        ("shards", f"{size}, three nodes: waits: asks when none is ready"): (Aim(2.0),)
        for size in ("small rows, 256", "Atari rows, 64")
    },
    **{
        ("shards", f"a limiter of all nodes, two learners, 64: {way}"): (Aim(5000.0),)
        for way in ("sample", "prefetch=2")
    },
    ("ray", "sample + update 512 of 1,000,000"): (Aim(100, over="RLlib"),),
    ("remote", "small rows"): (Aim(1e6), Aim(0.5, over="plain TCP")),
    ("remote", "Atari rows"): (Aim(0.5, over="plain TCP"), Aim(0.5, over="object store")),
    ("compat", "cpprb PER: add, sample, update"): (Aim(3, over="cpprb"),),
    ("compat", "cpprb MP: add, sample, update"): (Aim(3, over="cpprb"),),
    ("compat", "cpprb PER: 100 adds, handed on"): (Aim(3, over="cpprb"),),
    ("compat", "cpprb MP: 100 adds, handed on"): (Aim(3, over="cpprb"),),
    **{
        ("compat", f"SB3 {kind}, {envs}: {work}"): (Aim(1, over="stable_baselines3"),)
        for kind in ("rows", "n-step", "Dict")
        for envs in ("1 env", "8 envs")
        for work in ("add", "sample 64", "sample 256")
    },
    ("compat", "SB3 DQN, step"): (Aim(0.95, over="stable_baselines3"),),
    **{
        ("compat", f"TorchRL{line}"): (Aim(1, over="torchrl"),)
        for line in (": extend by 50", ": sample 256", " PER: extend by 50", " PER: sample 256", " PER: update 256")
    },
    **{
        ("compat", f"Tianshou{kind}, {envs}: {work}"): (Aim(1, over="tianshou"),)
        for envs in ("1 env", "8 envs")
        for kind, works in (
            ("", ("add", "sample 256", "targets")),
            (" PER", ("add", "sample 256", "targets", "update 256")),
        )
        for work in works
    },
    **{
        ("monitor", f"{quantity}, {command}"): (Aim(0.99, over="nobody looks"),)
        for quantity in ("batches", "rows")
        for command in ("watch", "record")
    },
    ("monitor", "processor time, watch"): (Aim(1.0),),
    ("monitor", "processor time, record"): (Aim(1.0),),
    ("checkpoint", "save, fraction of the disk"): (Aim(0.7),),
    ("checkpoint", "load, fraction of the disk"): (Aim(0.7),),
}


def aims_of(section: str, name: str) -> Sequence[Aim]:
    """Returns the aims of a line; none for most."""
    return AIMS.get((section, name), ())
