"""A Ray cluster in this process: its actors are plain objects, called at once. For tests of who is asked what, and of
what an error leads to; what Ray itself does is not tried."""

from types import SimpleNamespace

import numpy as np
import pytest

USES_RAY = (
    "runtime.actor_client",
    "sharded.coordinator_view",
    "sharded.coordinator",
    "sharded.coordinator_client",
    "sharded.writing",
    "sharded.reply_collector",
    "runtime.cluster",
    "workers.placement",
)
"""Modules of `torchreplay.ray` that ask for Ray on the ways that these tests take."""


class LocalActor:
    """An object whose methods are called as those of an actor.

    Attributes:
        it: The object.
        dead: Whether it was killed.
        unreachable: Calls from now on that Ray cannot deliver.
    """

    def __init__(self, cluster, it, failure=None):
        self.it, self.dead, self.unreachable = it, False, 0
        self._cluster, self._failure = cluster, failure

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args, **named: self._call(name, args, **named))

    def _call(self, name, args, **named):
        errors = self._cluster.exceptions
        if self.dead:
            return SimpleNamespace(error=errors.ActorDiedError())
        if self.unreachable:
            self.unreachable -= 1
            return SimpleNamespace(error=errors.ActorUnavailableError("the network is down", None))
        if isinstance(self._failure, errors.RayError):
            return SimpleNamespace(error=self._failure)
        if self._failure is not None:
            return SimpleNamespace(error=errors.RayTaskError(name, "", self._failure))
        answer = getattr(self.it, name)(*args, **named)
        if type(answer) is tuple:  # the object store takes copies
            answer = tuple(part.copy() if isinstance(part, np.ndarray) else part for part in answer)
        return SimpleNamespace(error=None, value=answer)


class LocalCluster:
    """What the package calls of Ray's module.

    Args:
        monkeypatch: Puts this in Ray's place.
        cpus: Of each node, by its name.

    Attributes:
        alive: The nodes and their resources; to be changed.
        failures: By node, what making a shard there raises, or what Ray says instead; to be changed.
        actors: All that were made.
        here: The node on which this process is, while it does not say otherwise; to be changed.
    """

    def __init__(self, monkeypatch, **cpus):
        self.exceptions = pytest.importorskip("ray").exceptions
        self.alive = {node: {"CPU": float(count)} for node, count in cpus.items()}
        self.failures, self.actors, self.named = {}, [], {}
        self.here = next(iter(self.alive))
        self.util = SimpleNamespace(
            scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
        )
        for module in USES_RAY:
            monkeypatch.setattr(f"torchreplay.ray.{module}.import_ray", lambda: self)
        monkeypatch.setattr("torchreplay.ray.sharded.shard_client.ray_node", lambda: self.here)
        monkeypatch.setattr("torchreplay.ray.wire.way.Way.link", lambda self: None)

    def nodes(self):
        return [{"NodeID": node, "Alive": True, "Resources": has} for node, has in self.alive.items()]

    def is_initialized(self):
        return True

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: self.here)

    def remote(self, kind):
        def options(scheduling_strategy=None, name=None, **_):
            def make(*args):
                self.actors.append(LocalActor(self, kind(*args), self.failures.get(scheduling_strategy)))
                if name is not None:
                    self.named[name] = self.actors[-1]
                return self.actors[-1]

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def get_actor(self, name, namespace):
        if self.named[name].dead:
            raise ValueError(f"there is no actor {name!r} any more")
        return self.named[name]

    def wait(self, calls, num_returns=1, timeout=None):
        return list(calls), []

    def get(self, calls, timeout=None):
        if isinstance(calls, list):
            return [self.get(call) for call in calls]
        if calls.error is not None:
            raise calls.error
        return calls.value

    def kill(self, actor, no_restart):
        actor.dead = True

    def close(self):
        """Gives the memory of all shards back."""
        for actor in self.actors:
            buffer = getattr(actor.it, "_buffer", None)
            if buffer is not None:
                buffer.close()
