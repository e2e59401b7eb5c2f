"""What runs a pool's workers. And Ray's own: actors, placement, and the table on other nodes."""

__all__ = ["placement", "resources", "table_replica"]
