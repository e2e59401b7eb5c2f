"""Linked rows that tests save or keep in a file, and their items before and after."""

import numpy as np
import torch
from linked_rows import everything

import torchreplay as tr

ENDS = {"terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}


def buffer_of_episodes(view, path=None):
    """A full ring of whole episodes, and one that has no end."""
    spec = {"obs": tr.Field((2,)), "reward": tr.Field(), **ENDS}
    buffer = tr.ReplayBuffer(spec, 50, view=view, sampler=tr.Prioritized(), path=path, seed=1)
    steps = np.arange(12)
    for episode in range(7):
        buffer.extend(
            obs=np.arange(26).reshape(13, 2) + 100 * episode,
            reward=steps + 0.5,
            terminated=steps == 11,
            truncated=steps < 0,
            priority=steps + episode,
        )
    writer = buffer.writer()
    writer.reset(obs=np.zeros(2))
    for step in range(5):
        writer.step(obs=np.full(2, step), reward=0.0, terminated=False, truncated=False)
    return buffer


def assert_same_items(one, other):
    """What can be drawn from one buffer can be drawn from the other, and nothing else."""
    ours, theirs = everything(one), everything(other)
    assert len(ours["key"]) > 0
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def buffer_of_goals(path=None):
    """An episode under `Hindsight`, whose reward function does not travel: minus the distance to the goal."""

    def closeness(achieved, desired):
        return -(achieved - desired).abs()[:, 0]

    view = tr.Hindsight(closeness, "obs", "goal", observation=("obs", "goal"))
    spec = {"obs": tr.Field((1,)), "goal": tr.Field((1,)), "reward": tr.Field(), **ENDS}
    buffer = tr.ReplayBuffer(spec, 50, view=view, path=path)
    last = np.arange(4) == 3
    buffer.extend(
        obs=np.arange(5)[:, None], goal=np.full((5, 1), 9), reward=np.ones(4), terminated=last & False, truncated=last
    )
    return buffer


def assert_new_goals_are_rewarded(batch):
    relabelled = batch["relabelled"]
    assert relabelled.any()
    assert torch.equal(batch["reward"][relabelled], -(batch["next_obs"] - batch["next_goal"]).abs()[relabelled, 0])
