"""Ray as a pool finds it, starts it and gives it back, and what is known beforehand not to fit into it."""

import signal
from types import SimpleNamespace

import pytest

from torchreplay.ray.runtime.session import RaySession


class SpareRay:
    """Stands for Ray where only its life matters."""

    def __init__(self, running):
        self.running, self.options, self.starts = running, None, 0

    def cluster_resources(self):
        return {"CPU": 8.0, "GPU": 2.0}

    def is_initialized(self):
        return self.running

    def nodes(self):
        return [{"NodeID": node, "Alive": True, "Resources": {"CPU": 4, "GPU": 1}} for node in ("here", "elsewhere")]

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "here", get_job_id=lambda: str(self.starts))

    def init(self, **options):
        self.running, self.options, self.starts = True, options, self.starts + 1

    def shutdown(self):
        self.running = False


def test_a_pool_leaves_a_running_ray_as_it_is(monkeypatch):
    spare = SpareRay(running=True)
    monkeypatch.setattr("torchreplay.ray.runtime.session.import_ray", lambda: spare)
    RaySession(cpus=4).close()
    assert spare.running
    assert spare.options is None


def test_a_pool_without_a_ray_starts_one_and_shuts_it_down(monkeypatch):
    spare = SpareRay(running=False)
    monkeypatch.setattr("torchreplay.ray.runtime.session.import_ray", lambda: spare)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    session = RaySession(cpus=999.5)
    assert spare.running
    assert spare.options["address"] == "local"
    assert spare.options["num_cpus"] == 1000
    session.close()
    assert not spare.running


@pytest.mark.parametrize("first", [0, 1])
def test_a_ray_that_a_pool_started_is_shut_down_with_the_last_pool_that_uses_it(monkeypatch, first):
    spare = SpareRay(running=False)
    monkeypatch.setattr("torchreplay.ray.runtime.session.import_ray", lambda: spare)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sessions = [RaySession(cpus=0), RaySession(cpus=0)]
    with pytest.raises(ValueError, match="lower num_cpus"):
        RaySession(cpus=5)
    for _ in range(2):
        sessions[first].close()
        assert spare.running
    sessions[1 - first].close()
    assert not spare.running


def test_a_pool_that_starts_a_ray_leaves_the_programs_handler_of_sigterm_in_place(monkeypatch):
    class Exiting(SpareRay):
        def init(self, **options):
            super().init(**options)
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own ends the program, too

    def save(*_):
        """As a program does that a queue's system is about to end."""

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    try:
        for handler, left in (
            (save, save),
            (signal.SIG_IGN, signal.SIG_IGN),
            (signal.SIG_DFL, signal.default_int_handler),
        ):
            spare = Exiting(running=False)
            monkeypatch.setattr("torchreplay.ray.runtime.session.import_ray", lambda spare=spare: spare)
            signal.signal(signal.SIGTERM, handler)
            RaySession(cpus=0).close()
            assert signal.getsignal(signal.SIGTERM) is left
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_ray_that_the_program_has_started_after_a_pools_own_is_left_as_it_is(monkeypatch):
    spare = SpareRay(running=False)
    monkeypatch.setattr("torchreplay.ray.runtime.session.import_ray", lambda: spare)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    session = RaySession(cpus=0)
    assert session.connected
    spare.shutdown()
    assert not session.connected
    spare.init()
    assert not session.connected
    session.close()
    assert spare.running


def test_explorers_that_ray_could_never_start_are_refused(monkeypatch):
    monkeypatch.setattr("torchreplay.ray.runtime.session.import_ray", lambda: SpareRay(running=True))
    with pytest.raises(ValueError, match=r"5 CPUs .* has 4"):
        RaySession(cpus=5)
    with pytest.raises(ValueError, match=r"2 GPUs .* has 1"):
        RaySession(cpus=0, gpus=2)
    with pytest.raises(ValueError, match=r"9 CPUs .* it has 8"):
        RaySession(cpus=9, here=False)


def test_what_others_of_the_program_reserve_may_not_be_there(monkeypatch, caplog):
    def told(cpus, gpus=0, here=True):
        caplog.clear()
        RaySession(cpus, gpus, here).close()
        return caplog.text

    monkeypatch.setattr("torchreplay.ray.runtime.session.import_ray", lambda: SpareRay(running=True))
    explorers = RaySession(cpus=7 * 0.4 + 0.4, gpus=1)
    anywhere = RaySession(cpus=4, here=False)
    assert "2 CPUs, this node has 4, and other pools and evaluators of this program ask for 3.2" in told(2)
    assert "1 GPUs" in told(0, gpus=1)
    assert "2 CPUs, it has 8, and other pools and evaluators of this program ask for 7.2" in told(2, here=False)
    assert told(0.8) == told(0.8, here=False) == ""  # whatever the sum of such fractions is
    explorers.close()
    assert told(4, gpus=1) == told(4, here=False) == ""
    anywhere.close()


def test_a_pool_joins_the_cluster_that_the_environment_names(monkeypatch):
    spare = SpareRay(running=False)
    monkeypatch.setattr("torchreplay.ray.runtime.session.import_ray", lambda: spare)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    RaySession(cpus=4).close()
    assert spare.options == {}  # a cluster refuses num_cpus and the like
