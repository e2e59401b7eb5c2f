"""A learner that is stopped while it holds the lock of a buffer."""

import signal

import numpy as np
from forked import Forked, eventually

import torchreplay as tr

MANY = 1 << 20


def feed_back_for_ever(buffer):
    keys, td = np.zeros(MANY, np.int64), np.ones(MANY)
    while True:
        buffer.update_priorities(keys, td)


class StoppedHolder(Forked):
    """Feeds very many TD errors back, so that it holds the lock most of the time, and is stopped when it does.

    Args:
        buffer: Must hold a row that can be drawn.
    """

    def __init__(self, buffer):
        super().__init__(feed_back_for_ever, buffer)
        eventually(lambda: buffer.stats().updated > 0)
        self.stop_with_the_lock_of(buffer)

    def stop_with_the_lock_of(self, buffer):
        eventually(lambda: self._stopped_with_the_lock_of(buffer), interval=0.01)

    def _stopped_with_the_lock_of(self, buffer):
        self.signal(signal.SIGSTOP)
        eventually(lambda: self.state() == "T")
        try:
            buffer.sample(1, timeout=0)
        except tr.ReplayTimeout:
            return True
        self.go_on()
        return False

    def state(self):
        with open(f"/proc/{self.pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]

    def go_on(self):
        self.signal(signal.SIGCONT)
