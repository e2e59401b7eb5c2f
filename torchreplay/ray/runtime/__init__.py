"""Ray itself: how it is started, which nodes it has, and how a node's actor is found."""
