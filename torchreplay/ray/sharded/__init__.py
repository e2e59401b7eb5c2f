"""One buffer over many nodes of the Ray cluster."""

__all__ = ["local_shard", "local_writing", "sharded_replay", "stats"]
