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
    rows = buffer.writer(envs)
    rng, taken = np.random.default_rng(0), {}
    obs, _ = envs.reset(seed=0)
    rows.reset(obs=obs)
    ended = np.zeros(3, bool)
    for _ in range(40):
        actions = rng.integers(0, 2, 3)
        next_obs, rewards, terminations, truncations, _ = envs.step(actions)
        rows.step(obs=next_obs, action=actions, reward=rewards, terminated=terminations, truncated=truncations)
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
    rows.close()
    buffer.close()
    envs.close()


def test_the_targets_of_c51_are_those_of_each_item():
    buffer = tr.ReplayBuffer(
        {"obs": tr.Field(4), "action": tr.Field((), torch.int64), "reward": tr.Field()}
        | {end: tr.Field((), torch.bool) for end in ("terminated", "truncated")},
        100,
        view=tr.Transitions(gamma=GAMMA),
        sampler=tr.Prioritized(0.6, 0.4),
    )
    rows, ends = buffer.writer(), {"truncated": False}
    for episode in range(10):
        rows.reset(obs=np.full(4, episode))
        rows.step(obs=np.zeros(4), action=episode % 2, reward=0.5, terminated=False, **ends)
        rows.step(obs=np.zeros(4), action=episode % 2, reward=1.0, terminated=True, **ends)
    data, atoms = buffer.sample(7), torch.linspace(-2, 2, 7)  # as many items as atoms: a wrong shape would not be told
    next_atoms = data["reward"].unsqueeze(-1) + data["discount"].unsqueeze(-1) * atoms
    for k in range(7):
        goes_on = data["reward"][k] == 0.5
        torch.testing.assert_close(next_atoms[k], data["reward"][k] + GAMMA * goes_on * atoms)
    buffer.update_priorities(data, torch.rand(7))  # a loss an item


def test_environments_of_older_gymnasium_reset_in_the_same_step():
    # Gymnasium 0.29: an array of objects, None where no episode has ended.
    spec = {"obs": tr.Field(2), "action": tr.Field((), torch.int64), "reward": tr.Field()}
    spec |= {end: tr.Field((), torch.bool) for end in ("terminated", "truncated")}
    buffer = tr.ReplayBuffer(spec, 100, view=tr.Transitions(gamma=GAMMA))
    rows = buffer.writer(num_envs=2, autoreset="same_step")
    rows.reset(obs=np.zeros((2, 2)))
    common = {"action": np.zeros(2, int), "reward": np.ones(2), "terminated": np.zeros(2, bool)}
    rows.step(obs=np.ones((2, 2)), truncated=np.zeros(2, bool), final_obs={}.get("final_observation"), **common)
    infos = {"final_observation": np.array([np.full(2, 9.0), None], dtype=object)}
    truncated = np.array([True, False])
    rows.step(obs=np.full((2, 2), 5.0), truncated=truncated, final_obs=infos.get("final_observation"), **common)
    items = buffer.gather(buffer.keys())
    ended = items["next_obs"][items["truncated"]]
    assert ended.tolist() == [[9.0, 9.0]]
    assert not (items["next_obs"] == 5).all(1)[items["truncated"]].any()
