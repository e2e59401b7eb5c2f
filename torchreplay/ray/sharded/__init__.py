"""One buffer over many nodes of the Ray cluster."""

__all__ = ["local_writing", "shard_writer", "sharded_replay", "stats"]
