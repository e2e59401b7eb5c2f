"""A backend without processes: workers whose runs end as a script says."""

import threading
from collections import deque

from torchreplay.workers.supervisor import Policy, Supervisor
from torchreplay.workers.worker_process import Outcome
from torchreplay.workers.worker_table import WorkerTable

RAISED = Outcome("raised", "KeyError: 'boom'", "Traceback: in explore, boom")
DIED = Outcome("died", "its process died", "what Ray knows")
ENDED = Outcome("ended")


class ScriptedActors:
    """Runs that end as a script says: at once with an outcome, or never if it returns None."""

    slow_start_hint = " (hint)"

    class Run:
        def __init__(self, launch, outcome):
            self.launch, self.result = launch, outcome
            self.interrupted = self.killed = False

    def __init__(self, script):
        self.script, self.runs = script, []
        self.changed = threading.Condition()

    def launch(self, launch):
        run = self.Run(launch, self.script(launch))
        self.runs.append(run)
        return run

    def wait(self, runs, timeout):
        with self.changed:
            self.changed.wait_for(lambda: any(run.result for run in runs), max(timeout, 0.0))
            return [run for run in runs if run.result]

    def end(self, run, outcome):
        with self.changed:
            run.result = outcome
            self.changed.notify_all()

    def outcome(self, run):
        return run.result

    def release(self, run):
        pass

    def is_free(self, index):
        return True

    def interrupt(self, run, pid):
        run.interrupted = True

    def kill(self, run):
        run.killed = True
        self.end(run, Outcome("died", "killed"))

    def await_exit(self, pids):
        pass

    def close(self):
        pass


class Marks:
    """Counts the marks that keep learners waiting."""

    def __init__(self):
        self.open = 0

    def __call__(self):
        self.open += 1
        return self

    def close(self):
        self.open -= 1


def supervise(actors, num_explorers=1, max_restarts=-1, restart_delay=0.0, marks=None, heartbeat_timeout=None):
    """Returns a supervisor of workers that `actors` run."""
    policy = Policy(1, 0, max_restarts, restart_delay, heartbeat_timeout)
    names = [f"explorer {index}" for index in range(num_explorers)]
    return Supervisor(actors, WorkerTable(num_explorers), names, policy, marks or Marks(), deque())
