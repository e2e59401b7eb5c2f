"""What a save brings to the disk, and in which order."""

import os
from pathlib import Path


def watch_syncs(patch, root, which=None, failure=None):
    """Notes, from here on, what in a checkpoint's directory is brought to the disk.

    Args:
        patch: What is undone in the end.
        root: The directory.
        which: Number of a call of fsync that does its work and fails then, counted from 0; None: none does.
        failure: The class of what it raises.

    Returns:
        Paths below `root`, and `"replaced"` where one finds another description than before: it grows.
    """
    fsync, description, synced = os.fsync, root / "checkpoint.json", []
    before, calls = description.read_bytes(), []

    def watched(fd):
        fsync(fd)
        if "replaced" not in synced and description.read_bytes() != before:
            synced.append("replaced")
        synced.append(str(Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(root)))
        calls.append(fd)
        if len(calls) - 1 == which:
            raise failure("after fsync")

    patch.setattr(os, "fsync", watched)
    return synced
