"""Ray itself: how it is started, which nodes it has, and how a node's actor is found."""

__all__ = ["cluster", "node_actor", "session"]
