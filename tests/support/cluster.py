"""A Ray cluster of several nodes on this machine, for tests of what crosses from one node to another.

Its nodes share the kernel, and with it the boot id, /proc and /dev/shm. So what must not cross from node to node could.
That makes tests sharper than they would be between machines.

Ray takes six to nine seconds of a core to start. So test modules share one, each with as many nodes as it asks for.
"""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from forked import eventually
from paths import import_path

MEMORY = 80 * 2**20  # bytes of each node's object store: little more than the least that Ray accepts
SETTINGS = {
    # Workers come when they are needed: a process that imports Ray costs a second of two cores.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    # A killed node refuses connections at once; a slow one still has 10 s for each of five answers.
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 300,
}


@dataclass
class RayCluster:
    """The running cluster. This process is connected to its head, node 0.

    Attributes:
        ray: The module.
        nodes: Ray's nodes: the head, then the others.
    """

    ray: Any
    _cluster: Any
    nodes: list[Any] = field(default_factory=list)

    @property
    def node_ids(self):
        """Ray's ids of the nodes, the head first."""
        return [node.node_id for node in self.nodes]

    def on(self, node, **options):
        """Options that put a remote function or actor on a node, given by its number; it takes none of its CPUs."""
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self.node_ids[node], soft=False)
        return {"num_cpus": 0, "scheduling_strategy": strategy, **options}

    @contextmanager
    def one_more(self, **options) -> Iterator[int]:
        """Adds a node for the length of a `with`, and gives its number; `kill` may end it earlier."""
        node = self._add(**options)
        try:
            yield len(self.nodes) - 1
        finally:
            if node in self.nodes:
                self._end(node)

    def kill(self, number):
        """Ends all processes of a node with SIGKILL, and returns when Ray counts it as dead."""
        node = self.nodes[number]
        self._end(node)
        eventually(lambda: not self._is_alive(node.node_id))

    def actors(self, class_name):
        """Ray's records of the actors of a class that are alive, being made, or restarting."""
        found = self.ray._private.state.actors().values()
        return [a for a in found if a["ActorClassName"] == class_name and a["State"] != "DEAD"]

    def has_free_cpus(self):
        """Whether no task and no actor has reserved a CPU."""
        return self.ray.available_resources().get("CPU") == self.ray.cluster_resources()["CPU"]

    def resize(self, size):
        """Adds nodes, or kills the last ones, until it has that many."""
        while len(self.nodes) < size:
            self._add()
        while len(self.nodes) > size:
            self.kill(len(self.nodes) - 1)

    def _add(self, **options):
        with pytest.MonkeyPatch.context() as patch, own_sigterm():
            # What a test module defines, or imports, workers on all nodes can import.
            patch.setenv("PYTHONPATH", import_path(os.environ.get("PYTHONPATH", "")))
            node = self._cluster.add_node(
                **{"num_cpus": 2, "object_store_memory": MEMORY, "include_dashboard": False, **options}
            )
        self.nodes.append(node)
        return node

    def _end(self, node):
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def _is_alive(self, node_id):
        return any(node["Alive"] for node in self.ray.nodes() if node["NodeID"] == node_id)


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Gives the handler of SIGTERM back that there was. Ray's would end the nodes from any child that is forked."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster of one node of 2 CPUs, to which this process is connected; it takes seconds to come and to go."""
    ray = pytest.importorskip("ray")
    from ray._common.utils import reset_ray_address
    from ray.cluster_utils import Cluster

    cluster = RayCluster(ray, Cluster(shutdown_at_exit=True))
    try:
        cluster._add(_system_config=SETTINGS, include_log_monitor=False, no_monitor=True)
        reset_ray_address()  # else other programs of this machine would join it
        with own_sigterm():
            ray.init(address=cluster._cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        yield cluster
    finally:
        with suppress(Exception):
            ray.shutdown()
        cluster._cluster.shutdown()


class SharedCluster:
    """The cluster that test modules of this process share, one after another."""

    def __init__(self):
        self._stack, self._cluster = ExitStack(), None

    @contextmanager
    def of(self, size) -> Iterator[RayCluster]:
        """Gives the cluster with that many nodes. Fails if CPUs stay reserved, and ends the cluster then."""
        if self._cluster is None:
            self._cluster = self._stack.enter_context(ray_cluster())
        self._cluster.resize(size)
        yield self._cluster
        try:
            eventually(self._cluster.has_free_cpus)
        except BaseException:
            self.end()
            raise

    def end(self):
        """Ends it. The next module that asks gets a new one."""
        self._cluster = None
        self._stack.close()
