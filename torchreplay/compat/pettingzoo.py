"""A replay buffer for each agent of a PettingZoo parallel environment, and what writes the steps of all of them.

Tested with pettingzoo 1.27.0. `docs/pettingzoo.md` is the guide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.buffer.writer import Writer
from torchreplay.schema.spaces import spec_from_space
from torchreplay.schema.spec import Field
from torchreplay.schema.views import Rows, Transitions, View
from torchreplay.segment.closeable import Closeable

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv


def specs_from_env(env: ParallelEnv[Any, Any, Any]) -> dict[str, dict[str, Any]]:
    """Returns the spec of each possible agent's rows, by the agent's name.

    Each is a dict of `obs`, `action`, `reward`, `terminated` and `truncated`, made of the agent's spaces: change it
    before it is used.

    Raises:
        ValueError: A space's values are no arrays.
    """

    def spec(agent: Any) -> dict[str, Any]:
        fields = {"obs": spec_from_space(env.observation_space(agent))}
        fields |= {"action": spec_from_space(env.action_space(agent)), "reward": Field()}
        return fields | {"terminated": Field((), bool), "truncated": Field((), bool)}

    return {agent: spec(agent) for agent in env.possible_agents}


def buffers_for(
    env: ParallelEnv[Any, Any, Any], capacity: int, *, view: View | None = None, name: str | None = None, **options: Any
) -> dict[str, ReplayBuffer]:
    """Returns a new buffer for each possible agent, by the agent's name.

    Args:
        env: Whose agents.
        capacity: Rows that fit into each buffer.
        view: How rows become items; None: `Transitions()`.
        name: Of the run. Each buffer is then named `name/agent`, and else as its agent.
        **options: As for a `ReplayBuffer`, the same for all of them.

    Raises:
        ValueError: A space's values are no arrays, or an argument of the buffers is out of range.
        MemoryError: The machine has too little memory left.
    """
    default: View = Transitions()
    return {
        agent: ReplayBuffer(
            spec,
            capacity,
            view=default if view is None else view,
            name=f"{agent}" if name is None else f"{name}/{agent}",
            **options,
        )
        for agent, spec in specs_from_env(env).items()
    }


class ParallelWriter(Closeable):
    """Writes the steps of a parallel environment, each agent's into its buffer.

    ```python
    buffers = buffers_for(env, 100_000)
    writer = ParallelWriter(buffers)
    observations, infos = env.reset()
    writer.reset(observations)
    while env.agents:
        actions = {agent: policies[agent](observations[agent]) for agent in env.agents}
        observations, rewards, terminations, truncations, infos = env.step(actions)
        writer.step(actions, observations, rewards, terminations, truncations)
    ```

    Agents may leave before others, and may come later. An agent that is gone without a flag is truncated. A context
    manager, for one thread and one environment.

    Args:
        buffers: By agent; of a view that links rows. Agents may share a buffer: their episodes do not mix. Or writers,
            one for each agent, such as `ctx.writer(name=agent)` of an explorer.

    Raises:
        ValueError: There are no buffers, or one is of `Rows()`.
    """

    def __init__(self, buffers: Mapping[str, ReplayBuffer | Writer]) -> None:
        if not buffers:
            raise ValueError("buffers are empty: expected a buffer for each agent, such as buffers_for(env, capacity)")
        for agent, buffer in buffers.items():
            if isinstance(buffer, ReplayBuffer) and isinstance(buffer.view, Rows):
                raise ValueError(f"the buffer of {agent!r} is of {buffer.view}: expected a view that links rows")
        self._writers: dict[str, Writer] = {
            agent: given.writer() if hasattr(given, "writer") else given for agent, given in buffers.items()
        }  # not by class: buffers of other nodes, and their writers, have others
        self._running: dict[str, None] = {}  # in the order in which they came

    @property
    def running(self) -> tuple[str, ...]:
        """The agents whose episode is under way."""
        return tuple(self._running)

    def reset(self, observations: Mapping[str, Any]) -> None:
        """Begins the episodes of the agents there are. Those under way are truncated.

        Args:
            observations: What `env.reset` returned.

        Raises:
            KeyError: An agent has no buffer; nothing is written.
            ValueError: An observation does not fit; agents before it have begun.
        """
        self._require(observations)
        self.end_episode()
        self._begin(observations)

    def step(
        self,
        actions: Mapping[str, Any],
        observations: Mapping[str, Any],
        rewards: Mapping[str, Any],
        terminations: Mapping[str, Any],
        truncations: Mapping[str, Any],
        extra: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Writes a step of every agent that took part in it, and begins the episodes of agents that came.

        Args:
            actions: What `env.step` was given.
            observations: What it returned, here and for the others. An agent that has none any more is truncated where
                it stood.
            rewards: By agent.
            terminations: By agent.
            truncations: By agent.
            extra: Other fields of the spec, by agent.

        Raises:
            KeyError: An agent has no buffer, or lacks a reward or a flag; nothing is written.
            ValueError: A value does not fit, or an agent acts whose episode is not under way. What was written before,
                of other agents, stays: call `reset` next.
        """
        self._require(actions, observations)
        there = [agent for agent in actions if agent in observations]
        returned = {"reward": rewards, "termination": terminations, "truncation": truncations}
        for name, given in returned.items():
            if missing := [agent for agent in there if agent not in given]:
                raise KeyError(f"{missing[0]!r} has no {name}: expected one for each agent that acts")
        steps = {
            agent: (observations[agent], rewards[agent], terminations[agent], truncations[agent]) for agent in there
        }
        for agent in [agent for agent in self._running if agent not in steps]:
            self._end(agent)
        for agent, (observation, reward, terminated, truncated) in steps.items():
            if agent not in self._running:
                raise ValueError(f"{agent!r} acts, but its episode is not under way: call reset() first")
            self._writers[agent].step(
                obs=observation,
                action=actions[agent],
                reward=reward,
                terminated=bool(terminated),
                truncated=bool(truncated),
                **({} if extra is None else extra.get(agent, {})),
            )
            if terminated or truncated:
                del self._running[agent]
        self._begin({agent: value for agent, value in observations.items() if agent not in actions})

    def end_episode(self) -> None:
        """Truncates the episodes under way, as where a program stops before the environment does."""
        for agent in self.running:
            self._end(agent)

    def close(self) -> None:
        """Gives up the writers' places; using it again is a `ValueError`. Idempotent."""
        for writer in self._writers.values():
            writer.close()

    def _begin(self, observations: Mapping[str, Any]) -> None:
        for agent, observation in observations.items():
            if agent not in self._running:
                self._writers[agent].reset(obs=observation)
                self._running[agent] = None

    def _end(self, agent: str) -> None:
        self._writers[agent].end_episode()
        del self._running[agent]

    def _require(self, *given: Iterable[str]) -> None:
        for agents in given:
            for agent in agents:
                if agent not in self._writers:
                    raise KeyError(f"{agent!r} has no buffer: there are those of {', '.join(self._writers)}")

    def __repr__(self) -> str:
        return f"ParallelWriter({len(self._writers)} agents, {len(self._running)} under way)"
