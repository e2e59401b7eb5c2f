"""The loop of `docs/coming_from_cleanrl.md`, beside returns computed by hand."""

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import TimeLimit
from torch import nn

import torchreplay as tr

GAMMA = 0.9


def test_the_targets_of_the_page_are_those_of_the_steps_taken():
    envs = gymnasium.vector.SyncVectorEnv([lambda: TimeLimit(gymnasium.make("CartPole-v1"), 7)] * 3)
    q_network = nn.Linear(4, 2)
    buffer = tr.ReplayBuffer(
        tr.spec_from_env(envs), 1000, view=tr.Transitions(gamma=GAMMA), sampler=tr.Prioritized(0.6, 0.4)
    )
    writer = buffer.writer(num_envs=3, autoreset=envs.metadata["autoreset_mode"])
    rng, taken = np.random.default_rng(0), {}
    obs, _ = envs.reset(seed=0)
    writer.reset(obs=obs)
    ended = np.zeros(3, bool)
    for _ in range(40):
        actions = rng.integers(0, 2, 3)
        next_obs, rewards, terminations, truncations, _ = envs.step(actions)
        writer.step(obs=next_obs, action=actions, reward=rewards, terminated=terminations, truncated=truncations)
        for i in np.flatnonzero(~ended):  # the step after an end resets
            taken[obs[i].tobytes()] = next_obs[i], actions[i], rewards[i], terminations[i]
        obs, ended = next_obs, terminations | truncations
    assert any(step[3] for step in taken.values()) or len(taken) > 80

    data = buffer.sample(64)
    with torch.no_grad():
        target_max, _ = q_network(data["next_obs"]).max(dim=1)
        td_target = data["reward"] + data["discount"] * target_max
    old_val = q_network(data["obs"]).gather(1, data["action"].unsqueeze(-1)).squeeze(-1)
    loss = (data["weight"] * (td_target - old_val) ** 2).mean()
    loss.backward()
    buffer.update_priorities(data, td_target - old_val)
    assert td_target.shape == old_val.shape == (64,)
    for k in range(64):
        next_obs, action, reward, terminated = taken[data["obs"][k].numpy().tobytes()]
        with torch.no_grad():
            expected = reward + (0 if terminated else GAMMA * q_network(torch.as_tensor(next_obs)).max())
        torch.testing.assert_close(td_target[k], torch.as_tensor(expected, dtype=torch.float32))
        assert data["action"][k] == action
    writer.close()
    buffer.close()
    envs.close()
