"""Explorers: workers that run a user's function and fill a buffer."""
