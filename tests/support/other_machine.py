"""Another machine, as far as the kernel can play one: namespaces of its own for network, processes, mounts and IPC.

What runs there reaches this machine by a network, sees none of its processes, so that no descriptor of theirs
can be opened, and has a /dev/shm and a /tmp/ray of its own. The kernel, and with it the boot id, is the same.
"""

import itertools
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT, CalledProcessError, Popen, run

import pytest
from forked import eventually

ALONE = ["unshare", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
SET_UP = """
mount -t tmpfs tmpfs /dev/shm && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && ip link set lo up || exit 3
echo ready
read started
exec "$@"
"""


class Network:
    """A bridge of this machine's, which other machines are plugged into.

    Attributes:
        address: Of this machine.
    """

    def __init__(self, bridge: str, subnet: str) -> None:
        self.address = f"{subnet}.1"
        self._bridge, self._subnet = bridge, subnet
        self._hosts = itertools.count(2)

    @contextmanager
    def machine(self, command: Callable[[str], list[str]], **environment: str) -> Iterator[tuple[Popen[str], str]]:
        """Runs `command(address)` on a new machine until the `with` block ends; gives its process and its address."""
        process = Popen(
            [*ALONE, "sh", "-c", SET_UP, "sh", *command(address := f"{self._subnet}.{next(self._hosts)}")],
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            text=True,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            self._plug_in(process.pid, address)  # `unshare` has left this machine's network before it forked
            process.stdin.write("go\n")
            process.stdin.flush()
            yield process, address
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the first process of a namespace takes all others of it along
            process.wait()

    def _plug_in(self, pid: int, address: str) -> None:
        here, there = f"tr{secrets.token_hex(3)}", f"tr{secrets.token_hex(3)}"
        _ip("link", "add", here, "type", "veth", "peer", "name", there)
        _ip("link", "set", here, "master", self._bridge, "up")
        _ip("link", "set", there, "netns", str(pid))
        for change in (["addr", "add", f"{address}/24", "dev", there], ["link", "set", there, "up"]):
            _run("nsenter", "--target", str(pid), "--net", "ip", *change)


@contextmanager
def network() -> Iterator[Network]:
    """Makes a network of this machine and others; skips where that is forbidden."""
    bridge, subnet = f"tr{secrets.token_hex(3)}", f"10.213.{os.getpid() % 256}"
    try:
        _ip("link", "add", "name", bridge, "type", "bridge")
    except (OSError, CalledProcessError) as error:
        pytest.skip(f"no network can be made here: {error}")
    try:
        _ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        yield Network(bridge, subnet)
    finally:
        _ip("link", "del", bridge)


def ray_node(head: str, address: str) -> list[str]:
    """The command of a Ray node that joins the cluster at `head`."""
    ray = Path(sys.executable).with_name("ray")
    options = [f"--address={head}", f"--node-ip-address={address}", "--num-cpus=2", "--object-store-memory=80000000"]
    return [str(ray), "start", "--block", *options]


def joined(ray, address: str) -> str:
    """Returns Ray's id of the node at `address`, once it is there."""
    found: list[str] = []

    def look():
        found[:] = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == address]
        return bool(found)

    eventually(look, timeout=120)
    return found[0]


def _ip(*command: str) -> None:
    _run("ip", *command)


def _run(*command: str) -> None:
    run(command, check=True, capture_output=True, text=True)
