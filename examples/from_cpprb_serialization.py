"""What cpprb's design of its Ray support begins with: whether Ray can pass a shared buffer on. On torchreplay it can.

The import is changed, nothing else; then comes what that document sets out to reach.

    python examples/from_cpprb_serialization.py
"""

import ray

from torchreplay.compat.cpprb import MPPrioritizedReplayBuffer

rb = MPPrioritizedReplayBuffer(4, {"done": {}})
ray.util.inspect_serializability(rb, name="MPPrioritizedReplayBuffer")


@ray.remote
def add(rb):
    rb.add(done=1.0)


if __name__ == "__main__":
    ray.init()
    ray.get([add.remote(rb), add.remote(rb)])
    print(rb.get_all_transitions())
