"""Ray itself: how it is started, which nodes it has, and how an actor is asked."""

__all__ = ["actor_client", "cluster", "session"]
