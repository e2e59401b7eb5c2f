"""cpprb's example of a shared buffer with Ray, on torchreplay.

The import is changed and gym is brought up to date. So is the call by which Ray runs a function in its workers, which
later versions of Ray do not have. The program's queue and event need it: they belong to a `SyncManager`. The buffer
does not. One race is mended: all explorers share the queue, and one could wait for ever for what another had taken.

    python examples/from_cpprb_ray.py
"""

import base64
import contextlib
import multiprocessing as mp
import queue
import time

import gymnasium as gym
import numpy as np
import ray

from torchreplay.compat.cpprb import MPPrioritizedReplayBuffer, ReplayBuffer


class Model:
    def __init__(self, env):
        self.env = env
        self.w = None

    def train(self, transitions):
        """
        Update model weights and return |TD|
        """
        absTD = np.zeros(shape=(transitions["obs"].shape[0],))
        # omit

        return absTD

    def __call__(self, obs):
        """
        Choose action from observation
        """
        # omit
        act = self.env.action_space.sample()
        return act


@ray.remote
def explorer(env_name, global_rb, env_dict, q, stop):
    try:
        buffer_size = 200

        local_rb = ReplayBuffer(buffer_size, env_dict)
        env = gym.make(env_name)
        model = Model(env)

        obs, _ = env.reset()
        while not stop.is_set():
            with contextlib.suppress(queue.Empty):
                model.w = q.get_nowait()

            act = model(obs)
            next_obs, rew, terminated, truncated, _ = env.step(act)
            done = terminated or truncated

            local_rb.add(obs=obs, act=act, rew=rew, next_obs=next_obs, done=done)

            if done or local_rb.get_stored_size() == buffer_size:
                local_rb.on_episode_end()
                global_rb.add(**local_rb.get_all_transitions())
                local_rb.clear()
                obs, _ = env.reset()
            else:
                obs = next_obs
    finally:
        stop.set()

    return None


def run():
    n_explorers = 4

    nwarmup = 100
    ntrain = int(1e2)
    update_freq = 100

    env_name = "CartPole-v1"
    env = gym.make(env_name)

    buffer_size = 1e6
    env_dict = {
        "obs": {"shape": env.observation_space.shape},
        "act": {},
        "rew": {},
        "next_obs": {"shape": env.observation_space.shape},
        "done": {},
    }
    alpha = 0.5
    beta = 0.4
    batch_size = 32

    encoded = base64.b64encode(mp.current_process().authkey)

    def auth_fn(*args):
        mp.current_process().authkey = base64.b64decode(encoded)

    ray.init(runtime_env={"worker_process_setup_hook": auth_fn})

    # `BaseContext.Manager()` automatically starts `SyncManager`
    # Ref: https://github.com/python/cpython/blob/3.9/Lib/multiprocessing/context.py#L49-L58
    m = mp.get_context().Manager()
    q = m.Queue()
    stop = m.Event()
    stop.clear()

    rb = MPPrioritizedReplayBuffer(buffer_size, env_dict, alpha=alpha, ctx=m, backend="SharedMemory")

    model = Model(env)

    explorers = []

    print("Start Explorers")
    for _ in range(n_explorers):
        explorers.append(explorer.remote(env_name, rb, env_dict, q, stop))

    print("Start Warmup")
    while rb.get_stored_size() < nwarmup and not stop.is_set():
        time.sleep(1)

    print("Start Training")
    for i in range(ntrain):
        if stop.is_set():
            break

        s = rb.sample(batch_size, beta)

        absTD = model.train(s)
        rb.update_priorities(s["indexes"], absTD)

        if i % update_freq == 0:
            q.put(model.w)
    print("Finish Training")

    stop.set()
    ray.get(explorers)
    m.shutdown()


if __name__ == "__main__":
    run()
