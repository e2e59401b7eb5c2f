"""One buffer over many nodes of the Ray cluster."""

__all__ = ["local_shard", "sharded_replay", "stats", "writing"]
