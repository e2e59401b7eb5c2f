"""The benchmarks' own arithmetic: what they time, how they compare, and that a hanging child cannot hang them."""

import dataclasses
import itertools
import json
import mmap
import multiprocessing
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torchreplay as tr
from benchmarks import chart, kills, ragged_traffic
from benchmarks.cases import queueing, ragged
from benchmarks.cases.gpu import learner, measure_gpu, waits_within
from benchmarks.child import ChildError, run_module
from benchmarks.copies import repeat
from benchmarks.episodes import STREAMS, block, linked_buffer
from benchmarks.learner import q_learning
from benchmarks.line import Aim, Line
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import QUICK
from benchmarks.report import as_json, row
from benchmarks.workload import ATARI, SMALL
from torchreplay.checking import timing
from torchreplay.checking.timing import Candidate, interleave


def line(**samples: list[float]) -> Line:
    return Line("section", "name", "us", samples)


def test_a_round_of_a_queue_that_fails_counts_as_nothing_and_is_told(monkeypatch, capsys):
    def fail(*_):
        raise ChildError("it aborted")

    monkeypatch.setattr(queueing, "run_module", fail)
    first = next(queueing.measure_queue(QUICK))
    assert {value for values in first.samples.values() for value in values} == {0.0}
    assert "a round of torchreplay failed and counts as 0: it aborted" in capsys.readouterr().err


def test_the_advantage_is_taken_within_rounds_and_so_survives_a_machine_that_slows_down():
    drifting = line(torchreplay=[1.0, 2.0, 40.0], cpprb=[10.0, 20.0, 400.0])
    assert drifting.advantage("cpprb") == 10.0


def test_where_higher_is_better_the_advantage_turns_round():
    rates = dataclasses.replace(line(torchreplay=[20.0], cpprb=[5.0]), higher_is_better=True)
    assert rates.advantage("cpprb") == 4.0


def test_a_rival_that_did_nothing_at_all_is_beaten_infinitely_and_still_written_as_json():
    rates = dataclasses.replace(line(torchreplay=[20.0], cpprb=[0.0]), higher_is_better=True)
    assert rates.advantage("cpprb") == float("inf")
    json.dumps(as_json([rates], QUICK, 1.0), allow_nan=False)


@pytest.mark.parametrize(("bound", "met"), [(2.0, True), (1.9, False)])
def test_an_absolute_aim_is_judged_by_the_median(bound: float, met: bool):
    verdict = Aim(bound).judge(line(torchreplay=[1.0, 2.0, 9.0]))
    assert verdict is not None
    assert verdict.met is met


def test_an_aim_over_a_peer_that_is_not_installed_says_nothing():
    assert Aim(10, over="cpprb").judge(line(torchreplay=[1.0])) is None


def test_a_row_shows_every_column_and_a_dash_where_a_candidate_lacks_the_operation():
    shown = row(line(torchreplay=[1.0, 1.0], tianshou=[3.0, 3.0]), ["torchreplay", "cpprb", "tianshou"])
    assert shown.split()[:7] == ["name", "us", "1.00", "(1.00-1.00)", "-", "3.00", "(3.00-3.00)"]
    assert "3.00x" in shown


def test_rounds_alternate_between_the_candidates_and_rotate_who_goes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "_preemptions", lambda: 0)
    order: list[str] = []

    def candidate(name: str) -> Candidate:
        def run(n: int) -> None:
            order.append(name)
            end = time.perf_counter() + 1e-3 * n
            while time.perf_counter() < end:
                pass

        return Candidate(name, run)

    plan = dataclasses.replace(QUICK, rounds=4, seconds=0.002)
    seconds = interleave([candidate("a"), candidate("b")], plan.rounds, plan.seconds)
    warm_ups, timed = order[-16::2], order[-15::2]
    assert warm_ups == timed == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4}
    assert min(seconds["a"]) >= 1e-3


def test_a_loop_goes_on_where_the_round_before_ended_so_that_no_round_finds_its_rows_in_the_caches():
    seen: list[int] = []
    run = repeat(seen.append, [0, 1, 2])
    run(2)
    run(2)
    assert seen == [0, 1, 2, 0]


def test_an_episode_has_one_observation_more_than_steps_and_every_lane_ends_with_the_last():
    episode = block(SMALL, 5, (3,))
    assert {name: values.shape for name, values in episode.items()} == {
        "obs": (6, 3, 4),
        "action": (5, 3),
        "reward": (5, 3),
        "terminated": (5, 3),
        "truncated": (5, 3),
    }
    assert episode["terminated"].tolist() == [[False] * 3] * 4 + [[True] * 3]


def test_a_buffer_of_episodes_is_full_of_the_rows_of_interleaved_streams():
    rows = 33 * STREAMS  # of one episode in each stream
    with linked_buffer(SMALL, 1024, tr.Transitions(n_step=3)) as buffer:
        second = buffer.storage["obs"][rows : 2 * rows].numpy()
        assert (second.reshape(33, STREAMS, 4) == block(SMALL, 32, (STREAMS,), seed=1)["obs"]).all()
        assert len(buffer) == 1024
        assert buffer.stats().drawable >= 0.9 * 1024


def test_a_preempted_round_is_repeated_and_the_quickest_kept_when_all_are(monkeypatch: pytest.MonkeyPatch):
    counts = iter(range(1000))
    monkeypatch.setattr(timing, "_preemptions", lambda: next(counts))
    elapsed = iter([5.0, 3.0, 4.0, 6.0, 7.0])
    monkeypatch.setattr(timing, "_timed", lambda run, n: next(elapsed))
    assert timing._undisturbed(lambda n: None, 1) == 3.0


def test_a_child_that_blocks_for_ever_is_killed_and_named():
    with pytest.raises(ChildError, match=r"timeit .* did not end within 0.5 s"):
        run_module("timeit", {"number": 1, "setup": "import signal; signal.pause()"}, limit=0.5)


def test_a_survivor_that_blocks_counts_as_a_hang_and_one_that_fails_does_not():
    def goes_on(peer, calls, done):
        done.value = len(calls)

    def blocks(peer, calls, done):
        signal.pause()

    assert not kills.hangs(goes_on, None, limit=60.0)
    assert kills.hangs(blocks, None, limit=0.2)
    with pytest.raises(RuntimeError, match="failed after 0 calls: that is no hang"):
        kills.hangs(lambda peer, calls, done: None, None, limit=60.0)


@pytest.mark.parametrize("victim", kills.VICTIMS)
def test_nobody_hangs_when_an_explorer_or_a_learner_of_torchreplay_is_killed(victim):
    run = kills.Kills("torchreplay", victim, trials=2, limit=60.0, seed=0)
    assert kills.run(run) == {"explorer": 0, "learner": 0}


def test_a_child_that_fails_hands_on_its_error():
    with pytest.raises(ChildError, match="invalid choice: 'nobody'"):
        run_module("benchmarks.contest", {"peer": "nobody"}, limit=60.0)


@pytest.mark.parametrize(("value", "flag"), [(True, "--much"), (False, "--no-much")])
def test_a_child_gets_what_is_true_or_false_as_a_flag_alone(value, flag):
    with pytest.raises(ChildError, match=f"unrecognized arguments: {flag}\n"):
        run_module("json.tool", {"much": value}, limit=60.0)


def test_a_learner_takes_as_many_steps_as_asked_for_and_feeds_back_each():
    peer = TorchreplayPeer(SMALL, 1024)
    peer.fill()
    step = q_learning(SMALL, "cpu")
    steps, updated = [], peer.buffer.stats().updated

    def counted(batch):
        steps.append(batch)
        return step(batch)

    learn = learner(counted, tr.ReplayDataset(peer.buffer, 32), peer.update)
    learn(3)
    learn(2)
    assert len(steps) == 5
    assert peer.buffer.stats().updated == updated + 5 * 32
    del learn
    peer.close()


def test_frames_are_learned_from_by_a_network_for_frames():
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (2, 2, 4, 84, 84), dtype=torch.uint8, generator=generator)
    batch = {"obs": frames[0], "next_obs": frames[1], "action": torch.tensor([0, 3]), "reward": torch.ones(2)}
    batch |= {"done": torch.tensor([False, True]), "weight": torch.ones(2)}
    assert q_learning(ATARI, "cpu")(batch).shape == (2,)


def test_waits_are_counted_within_the_region_alone():
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA

    def event(name, start, end, device_type=cpu):
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device_type)

    events = [
        event("region", 10, 20),
        event("region", 0, 100, gpu),  # what the device did for it goes on for longer
        event("cudaDeviceSynchronize", 5, 6),
        event("cudaStreamSynchronize", 11, 12),
        event("cudaEventSynchronize", 19, 25),
        event("cudaMemcpy", 15, 16),
        event("cudaMemcpyAsync", 16, 17),
        event("cudaDeviceSynchronize", 21, 30),
    ]
    assert waits_within(events, "region") == 3


def test_without_a_device_the_gpu_case_says_that_it_needs_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (only,) = measure_gpu(QUICK)
    assert row(only, []) == "needs a CUDA device"
    json.dumps(as_json([only], QUICK, 1.0), allow_nan=False)


@pytest.mark.gpu
def test_the_profiler_shows_no_wait_in_a_step_with_replay_and_one_where_the_td_errors_are_fetched():
    plan = dataclasses.replace(QUICK, rounds=3, shrink=1000)
    waits = [line for line in measure_gpu(plan) if line.name.endswith("waits a step")]
    assert len(waits) == 4
    for counted in waits:
        assert counted.median("torchreplay") == 0
        assert counted.median("td.cpu() each step") >= 1


def charted() -> list[Line]:
    measured: dict[str, list[float]] = {"torchreplay": [1.0, 3.0, 2.0], "cpprb": [20.0, 30.0, 10.0]}
    return [Line(*key, "us", dict(measured)) for panel in chart.PANELS for key in panel.lines]


def test_the_picture_of_three_figures_is_drawn_light_and_dark_from_all_of_its_benchmarks(tmp_path: Path):
    assert chart.draw(charted(), tmp_path / "a.png") == [tmp_path / "a.png", tmp_path / "a_dark.png"]
    assert {path.read_bytes()[:4] for path in tmp_path.iterdir()} == {b"\x89PNG"}


def test_no_picture_is_drawn_where_one_of_its_benchmarks_is_missing(tmp_path: Path):
    assert chart.draw(charted()[1:], tmp_path / "a.png") == []
    assert not list(tmp_path.iterdir())


def test_memory_that_processes_share_is_counted_once():
    before = ragged_traffic.shared_out_bytes()
    with mmap.mmap(-1, 256 << 20) as shared:
        shared.write(bytes(256 << 20))
        here, there = multiprocessing.Pipe()

        def touch():
            shared.seek(0)
            there.send(len(shared.read()))
            there.recv()

        other = multiprocessing.get_context("fork").Process(target=touch)
        other.start()
        assert here.recv() == 256 << 20
        grown = ragged_traffic.shared_out_bytes() - before
        here.send(None)
        other.join()
    # The other process has memory of its own, too: not as much as the shared one.
    assert 256 << 20 <= grown < 480 << 20


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["torchreplay", "multiprocessing.Queue"])
def test_rollouts_reach_the_learner_whole_and_only_who_holds_them_has_memory_to_show(peer):
    options = {"peer": peer, "rollouts": 200, "seconds": 0.01}
    figures = run_module("benchmarks.ragged_traffic", options, limit=100.0)
    holds = peer == "torchreplay"
    assert {name for name, figure in figures.items() if figure is None} == (set() if holds else {"put", "memory"})
    assert min(figures["get"], figures["together"], figures["memcpy"]) > 0
    if holds:  # of what is held, all is resident
        assert figures["memory"] > 1
        assert 1 / figures["together"] == pytest.approx(1 / figures["put"] + 1 / figures["get"])


@pytest.mark.slow
def test_no_rollout_is_lost_when_learner_and_generator_are_killed():
    figures = run_module("benchmarks.rollouts", {"peer": "torchreplay", "kills": 2}, limit=150.0)
    assert figures["kills"] == 2
    assert (figures["lost"], figures["hung"]) == (0, False)


def test_lines_of_rollouts_leave_out_who_has_no_such_figure_and_count_a_failed_round_as_nothing(monkeypatch):
    figures = {
        "torchreplay": {"memory": 1.05, "put": 4e9, "get": 4e9, "together": 2e9, "memcpy": 8e9},
        "Ray actor": {},
        "multiprocessing.Queue": {"memory": None, "put": None, "get": 1e8, "together": 1e8, "memcpy": 8e9},
    }
    monkeypatch.setattr(ragged, "_installed", lambda: list(figures))
    monkeypatch.setattr(ragged, "_round", lambda plan, peer: figures[peer])
    memory, put, _, together, share = itertools.islice(ragged.measure_ragged(QUICK), 5)
    assert memory.samples == {"torchreplay": [1.05]}
    assert put.samples == {"torchreplay": [4.0], "Ray actor": [0.0]}
    assert together.samples == {"torchreplay": [2.0], "Ray actor": [0.0], "multiprocessing.Queue": [0.1]}
    assert share.samples == {"torchreplay": [0.5]}  # each byte is copied into the buffer, and out of it
