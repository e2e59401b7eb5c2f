"""Workers as Ray actors, anywhere in the cluster: their backend, where they run, their copy of the pool's table."""

__all__ = ["named", "placement", "resources", "table_replica"]
