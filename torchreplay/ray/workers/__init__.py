"""Supervised worker processes: Ray actors or plain processes that are started, watched and restarted."""
