"""Ctrl-C at any moment: calls that a real signal interrupts, and what must be left of them."""

import gc
import random
import signal
import time

from belongings import threads
from forked import eventually


class CtrlC:
    """A handler of signals that interrupts as long as it is armed: one may come when the call is over."""

    armed = False

    def __call__(self, *_):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


def interrupt_calls(call, times, seed):
    """Makes a call until it was cut short that often, at random moments."""
    ctrl_c, chance, left = CtrlC(), random.Random(seed), times
    before = signal.signal(signal.SIGALRM, ctrl_c)
    duration = min(seconds(call) for _ in range(5))
    while left:
        try:
            ctrl_c.armed = True
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, duration))
            call()
            ctrl_c.armed = False
        except BaseException:
            if ctrl_c.armed:
                raise
            left -= 1  # most often by a KeyboardInterrupt; shutil.rmtree may close a descriptor twice when it comes
    signal.signal(signal.SIGALRM, before)


def seconds(call):
    began = time.monotonic()
    call()
    return time.monotonic() - began


def assert_interrupted_calls_leave_no_thread(call, times, seed=0):
    before = threads()
    interrupt_calls(call, times, seed)
    gc.collect()
    eventually(lambda: threads() <= before, timeout=20)
