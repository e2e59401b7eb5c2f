"""RLlib: ``PrioritizedEpisodeReplayBuffer``, what its DQN and SAC replay from."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import SMALL

EPISODE = 200


class RllibEpisodes:
    """A full buffer of episodes of 200 steps.

    Args:
        capacity: Steps that it holds.
    """

    def __init__(self, capacity: int) -> None:
        from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer

        self._buffer = PrioritizedEpisodeReplayBuffer(capacity, alpha=0.6)
        for episode in self.episodes(capacity // EPISODE):
            self.add(episode)

    def episodes(self, n: int) -> Iterator[Any]:
        """Yields ``n`` episodes that the buffer does not have."""
        from ray.rllib.env.single_agent_episode import SingleAgentEpisode

        rows = SMALL.rows(EPISODE + 1)
        for _ in range(n):
            yield SingleAgentEpisode(
                observations=list(rows["obs"]),
                actions=list(rows["action"][:EPISODE]),
                rewards=list(rows["reward"][:EPISODE]),
                terminated=True,
                len_lookback_buffer=0,
            )

    def add(self, episode: Any) -> None:
        """Adds an episode."""
        self._buffer.add(episode)

    def sample(self, n: int) -> Any:
        """Draws transitions."""
        return self._buffer.sample(batch_size_B=n, n_step=1, beta=0.4)

    def update(self, td: NDArray[np.float32]) -> None:
        """Feeds TD errors back for the last draw, the only one that this buffer knows."""
        self._buffer.update_priorities(td)
