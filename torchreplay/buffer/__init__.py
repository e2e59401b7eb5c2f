"""The replay buffer of one machine: writing, sampling, feeding TD errors back."""

__all__ = [
    "admitted_items",
    "base",
    "episodes",
    "final_observations",
    "flat_episodes",
    "footprint",
    "groups",
    "inspection",
    "jams",
    "local_sampler",
    "local_source",
    "notices",
    "pending_updates",
    "prefetch",
    "queue",
    "replay_buffer",
    "rewriting",
    "stats",
    "tree_summary",
    "writer",
]
