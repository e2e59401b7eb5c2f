"""What is said of a run: each run here is sick on purpose, with real buffers, and one is well."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from stopped_holder import StoppedHolder
from watched_buffers import after, learn_for_ever, look_at, make, write, write_for_ever

import torchreplay as tr
from torchreplay.monitoring.advice import Findings, WeightsInUse, advise
from torchreplay.monitoring.slots import SLOTS
from torchreplay.monitoring.timeline import Timeline
from torchreplay.segment.process_state import state_of


def said(findings):
    return {advice.topic: advice.text for advice in advise(findings)}


def test_late_td_errors():
    buffer = make(100)
    write(buffer, 100)

    def outrun():
        for _ in range(10):
            batch = buffer.sample(50)
            write(buffer, 25)  # a quarter of the ring: about a quarter of the batch is gone
            buffer.update_priorities(batch, np.ones(50))

    with look_at(buffer) as live:
        text = said(after(live, outrun))["stale"]
    stats = buffer.stats()
    share = stats.stale_updates / (stats.stale_updates + stats.updated)
    assert share > 0.1
    assert text.startswith(f"{100 * share:.0f} % of TD errors come too late")
    assert "lower prefetch, enlarge the buffer" in text


def test_td_errors_that_never_come():
    buffer = make(100)
    write(buffer, 100)
    with look_at(buffer) as live:
        text = said(after(live, lambda: [buffer.sample(8) for _ in range(120)]))["feedback"]
        assert "120 batches were drawn and no TD error has come back: call buffer.update_priorities" in text
        buffer.update_priorities(buffer.sample(8), np.ones(8))
        assert "feedback" not in said(after(live, lambda: None))


def test_uniform_draws_need_no_td_errors():
    buffer = make(100, sampler=tr.Uniform())
    write(buffer, 100)
    with look_at(buffer) as live:
        assert said(after(live, lambda: [buffer.sample(8) for _ in range(120)])) == {}


def starve(buffer, seconds):
    with buffer.expect_writers(), pytest.raises(tr.ReplayTimeout):
        buffer.sample(64, timeout=seconds)


def test_a_learner_that_starves():
    buffer = make(100, limiter=tr.SamplesPerInsert(4.0, min_size=10))
    write(buffer, 100)
    with look_at(buffer) as live:
        while True:
            try:
                with buffer.expect_writers():
                    buffer.sample(64, timeout=0)
            except tr.ReplayTimeout:
                break
        assert "starving" not in said(after(live, lambda: starve(buffer, 0.3), seconds=1.0))  # too short to judge by
        text = said(after(live, lambda: starve(buffer, 1.2), seconds=4.0))["starving"]
        assert "Learners wait 3" in text or "Learners wait 2" in text  # 1.2 of 4 s, less what a slice is long
        assert "add explorers, or let each item be drawn more often (SamplesPerInsert has a ratio of 4)" in text


def test_a_learner_that_waits_for_the_first_rows_is_no_reason_for_alarm():
    buffer = make(100, limiter=tr.MinSize(50))
    write(buffer, 20)
    with look_at(buffer) as live:
        (advice,) = advise(after(live, lambda: starve(buffer, 1.2), seconds=4.0))
    assert (advice.severity, advice.text) == ("note", "Learners wait for the first 50 items: 20 are there.")


def test_explorers_that_wait_for_the_learner_as_the_limiter_asks():
    buffer = make(100, limiter=tr.SamplesPerInsert(2.0, min_size=10, tolerance=1.0))
    rows = shared_counters(1)
    with look_at(buffer) as live, Forked(write_for_ever, buffer, rows, 1):
        eventually(lambda: any(p.waiting for p in live.snapshot().participants))
        start = live.snapshot().insert_wait
        findings = after(live, lambda: eventually(lambda: live.snapshot().insert_wait > start + 1.5), seconds=4.0)
    (advice,) = [advice for advice in advise(findings) if advice.topic == "held back"]
    assert advice.severity == "note"
    assert "as SamplesPerInsert(ratio=2) asks" in advice.text


@pytest.mark.parametrize("reaped", [True, False])
def test_an_explorer_that_was_killed_and_one_that_is_stopped(reaped):
    buffer = make()
    rows, others = shared_counters(1), shared_counters(1)
    with (
        look_at(buffer) as live,
        Forked(write_for_ever, buffer, rows) as victim,
        Forked(write_for_ever, buffer, others) as other,
    ):
        eventually(lambda: min(rows[0], others[0]) > 0)

        def strike():
            if reaped:
                victim.kill()
            else:  # its parent has not asked how it ended
                victim.signal(signal.SIGKILL)
                eventually(lambda: state_of(victim.pid) == "")
            other.signal(signal.SIGSTOP)
            eventually(lambda: state_of(other.pid) == "T")

        text = [advice.text for advice in advise(after(live, strike))]
    assert f"Process {victim.pid}, a writer, ended 10 s ago. If that was not meant, look at its log." in text
    assert f"Process {other.pid}, a writer, is stopped: continue it with `kill -CONT {other.pid}`." in text


def test_several_explorers_that_died_are_told_of_once():
    buffer = make()
    rows = [shared_counters(1) for _ in range(2)]
    with look_at(buffer) as live:
        explorers = [Forked(write_for_ever, buffer, counter) for counter in rows]
        eventually(lambda: all(counter[0] > 0 for counter in rows))
        findings = after(live, lambda: [explorer.kill() for explorer in explorers])
        pids = ", ".join(str(pid) for pid in sorted(explorer.pid for explorer in explorers))
        assert said(findings)["gone"].startswith(f"2 writers (processes {pids}) ended 10 s ago.")
        buffer.stop()
        findings.timeline.add(replace(live.snapshot(), time=findings.now.time + 1))
        assert "gone" not in said(findings)


def test_an_explorer_that_hangs_while_others_write():
    buffer = make()
    rows = shared_counters(1)
    quiet = buffer.writer()
    quiet.append(x=np.zeros(2))
    with look_at(buffer) as live, Forked(write_for_ever, buffer, rows):
        eventually(lambda: rows[0] > 0)
        findings = after(live, lambda: eventually(lambda start=rows[0]: rows[0] > start))
        late = tuple(replace(p, since_write=35.0) if p.pid == os.getpid() else p for p in findings.now.participants)
        findings.timeline.snapshots[-1] = replace(findings.now, participants=late)
        text = said(findings)["silent"]
    assert f"Process {os.getpid()}, a writer, has written no row for 35 s, while others have" in text


def test_a_stopped_process_that_holds_the_lock():
    buffer = make()
    write(buffer, 100)
    with look_at(buffer) as live, StoppedHolder(buffer) as holder:
        first = advise(after(live, lambda: None))[0]
    assert first.text.startswith(f"Process {holder.pid} holds the buffer's lock and is stopped: nobody can draw.")


def test_priorities_of_which_a_few_get_all_draws():
    buffer = make(2000, sampler=tr.Prioritized(alpha=1.0))
    keys = write(buffer, 2000)
    with look_at(buffer) as live:
        buffer.update_priorities(keys, torch.where(keys < 5, 1e4, 1e-2))
        text = said(after(live, lambda: None))["priorities"]
    assert text == "Half of the draws go to 0.15 % of the items: lower alpha (it is 1), or clip TD errors."


def test_priorities_that_are_all_the_same():
    buffer = make(2000)
    keys = write(buffer, 2000)
    with look_at(buffer) as live:
        buffer.update_priorities(keys, torch.full((2000,), 0.25))
        assert said(after(live, lambda: None))["priorities"].startswith("Nearly all priorities are 0.25:")


def test_a_large_buffer_that_warms_up_is_not_taken_for_one_whose_priorities_are_all_the_same():
    n = 4 * SLOTS
    buffer = make(n)
    keys = write(buffer, n)
    with look_at(buffer) as live:
        buffer.update_priorities(keys[: 2 * SLOTS], torch.linspace(0.1, 9.0, 2 * SLOTS))
        assert "priorities" not in said(after(live, lambda: None))
        buffer.update_priorities(keys, torch.full((n,), 0.25))
        assert "priorities" in said(after(live, lambda: None))


def test_items_that_nobody_draws():
    buffer = make(100)
    write(buffer, 100)
    buffer.sample(8)

    def flood():
        for _ in range(20):
            write(buffer, 50)
            buffer.update_priorities(buffer.sample(2), np.ones(2))

    with look_at(buffer) as live:
        assert "of the items are overwritten before they were ever drawn" in said(after(live, flood))["undrawn"]


def test_values_that_take_more_bytes_than_rows_take_slots():
    buffer = tr.ReplayBuffer({"x": tr.Ragged(torch.uint8)}, 1000, ragged_bytes=4096, name="long values")

    def flood():
        for _ in range(300):
            buffer.writer().append(x=bytes(128))
            len(buffer)

    with look_at(buffer) as live:
        assert "bytes" not in said(after(live, lambda: [buffer.writer().append(x=b"") for _ in range(200)]))
        flood()
        assert said(after(live, flood))["bytes"] == (
            f"ragged_bytes is the smaller measure: {len(buffer):,} of 1,000 rows fit into its 4,096. Raise it to about "
            f"{4096 * 1000 // len(buffer):,}, or lower the capacity."
        )


def test_a_run_that_lacks_one_side():
    buffer = make()
    with look_at(buffer) as live:
        write(buffer, 100)
        text = said(after(live, lambda: write(buffer, 100)))
        assert text["learner"] == "Nobody draws what is written: no learner is there."
    reading = make()
    with look_at(reading) as live:
        with reading.writer() as writer:
            writer.extend(x=np.zeros((100, 2)))
        text = said(after(live, lambda: reading.update_priorities(reading.sample(8), np.ones(8))))
        assert text["writer"].startswith("No writer is there")


def test_explorers_on_old_weights():
    buffer = make()
    with look_at(buffer) as live:
        timeline = Timeline()
        timeline.add(live.snapshot())
        weights = (WeightsInUse(3, 1, 7, 50, 0.5), WeightsInUse(4, 2, 49, 50, 0.5), WeightsInUse(5, 3, -1, 50, 0.5))
        (advice,) = advise(Findings(live, timeline, None, weights))
    assert advice.text.startswith("Explorer 3 acts on weights 43 publications old")


def test_a_stopped_buffer_is_noted():
    buffer = make()
    buffer.stop()
    with look_at(buffer) as live:
        (advice,) = advise(after(live, lambda: None))
    assert (advice.topic, advice.severity) == ("stopped", "note")


def test_warnings_come_before_notes():
    buffer = make(100)
    write(buffer, 100)
    buffer.stop()
    with look_at(buffer) as live:
        now = replace(live.snapshot(), draws=500, stopped=True)
        timeline = Timeline()
        timeline.add(now)
        severities = [advice.severity for advice in advise(Findings(live, timeline))]
    assert severities == ["warning", "note"]


def test_a_learner_and_an_explorer_that_keep_step_are_well():
    buffer = make(4096, limiter=tr.SamplesPerInsert(8.0, min_size=64))
    rows, batches = shared_counters(1), shared_counters(1)
    with look_at(buffer) as live, Forked(write_for_ever, buffer, rows), Forked(learn_for_ever, buffer, batches):
        eventually(lambda: batches[0] > 20)
        findings = after(live, lambda: eventually(lambda start=batches[0]: batches[0] > start + 50))
        warnings = [advice.text for advice in advise(findings) if advice.severity == "warning"]
    assert warnings == []


# Queues


def queue(capacity=100, **fifo):
    return make(capacity, sampler=tr.Fifo(**fifo))


def hold_for_ever(buffer, items, held):
    held[0] = len(buffer.sample(items)["x"])
    signal.pause()


def after_waits(live, name, seconds=1.5):
    """What is found where somebody has waited for so long, of 4 seconds."""
    start = getattr(live.snapshot(), name)
    return after(live, lambda: eventually(lambda: getattr(live.snapshot(), name) > start + seconds), seconds=4.0)


def test_a_learner_that_is_too_slow_for_a_queue():
    buffer = queue()
    with look_at(buffer) as live, Forked(write_for_ever, buffer, None, 1):
        eventually(lambda: any(p.waiting for p in live.snapshot().alive("writer")))
        buffer.sample(1)
        text = said(after_waits(live, "insert_wait"))["held back"]
    assert text.startswith("Explorers wait ")
    assert "% of their time for room: the learner is too slow, and 99 items wait to be drawn." in text
    assert "Add learners, give each a core of its own, or run fewer explorers." in text


def test_a_learner_that_holds_most_of_a_queue_by_hand():
    buffer = queue(commit="manual")
    with look_at(buffer) as live, Forked(write_for_ever, buffer, None, 1):
        eventually(lambda: len(buffer) == 100)
        buffer.sample(80)
        text = said(after_waits(live, "insert_wait"))["held back"]
    assert f"process {os.getpid()} holds the oldest of 80 items. Call commit() more often, or enlarge the queue" in text


def test_explorers_that_are_too_slow_for_a_queue_and_one_that_died():
    buffer = queue()
    with Forked(write, buffer, 3) as explorer:
        assert explorer.wait() == 0
    with look_at(buffer) as live:
        text = said(after(live, lambda: starve(buffer, 1.2), seconds=4.0))["starving"]
        assert "% of their time for items, and 3 are there: add explorers, or make them faster." in text
        buffer.sample(3)
        (advice,) = [a for a in advise(after(live, lambda: starve(buffer, 0.1))) if a.topic == "writer"]
        assert (advice.severity, advice.text) == ("note", "No writer is there, and nothing is left to draw.")


@pytest.mark.parametrize("items", [60, 10])
def test_a_stopped_learner_of_a_queue_is_said_to_take_its_room_only_where_it_holds_most(items):
    buffer, held = queue(), shared_counters(1)
    buffer.extend(x=np.zeros((100, 2), np.float32))
    with look_at(buffer) as live, Forked(hold_for_ever, buffer, items, held) as learner:
        eventually(lambda: held[0] == items)
        learner.signal(signal.SIGSTOP)
        eventually(lambda: state_of(learner.pid) == "T")
        with Forked(write_for_ever, buffer, None, 1):
            found = said(after_waits(live, "insert_wait", 2.0))
    room = ", and whose room writers wait for" if items == 60 else ""
    assert found["silent"] == (
        f"Process {learner.pid}, a learner, is stopped and holds {items} items, which nobody else gets{room}: "
        f"continue it with `kill -CONT {learner.pid}`."
    )
    if items == 60:
        assert "held back" not in found  # it is said already whose doing that is
    else:
        assert "the learner is too slow, and 90 items wait to be drawn" in found["held back"]


def test_a_stopped_learner_of_a_queue_that_others_draw_from_keeps_nobody_waiting():
    buffer, held = queue(), shared_counters(1)
    buffer.extend(x=np.zeros((100, 2), np.float32))
    with look_at(buffer) as live, Forked(hold_for_ever, buffer, 60, held) as learner:
        eventually(lambda: held[0] == 60)
        learner.signal(signal.SIGSTOP)
        eventually(lambda: state_of(learner.pid) == "T")
        with Forked(write_for_ever, buffer, None, 1):
            start = live.snapshot().head
            found = said(after(live, lambda: drain(buffer, lambda: live.snapshot().head > start + 1_000), seconds=4.0))
    assert found["silent"].startswith(f"Process {learner.pid}, a learner, is stopped and holds 60 items, which nobody")


def drain(buffer, enough):
    while not enough():
        buffer.sample(10, at_least=1)


FIRST = tr.Fifo(window=1.0)
"""Nobody overtakes an unfinished episode by more than a turn of the ring."""


@pytest.mark.parametrize("stopped", [True, False])
def test_a_writer_whose_unfinished_episode_keeps_a_queue_from_turning(stopped):
    flag = tr.Field((), torch.bool)
    spec = {"obs": tr.Field(2), "reward": tr.Field(), "terminated": flag, "truncated": flag}
    buffer = tr.ReplayBuffer(spec, 50, view=tr.Transitions(), sampler=FIRST, name=f"test {os.getpid()} unfinished")
    begun = shared_counters(1)

    def begin():
        writer = buffer.writer()
        writer.reset(obs=np.zeros(2))
        begun[0] = 1
        signal.pause()

    def go_on():
        with buffer.writer() as writer:
            writer.reset(obs=np.zeros(2))
            while True:
                writer.step(obs=np.zeros(2), reward=0.0, terminated=False, truncated=False)

    with look_at(buffer) as live, Forked(begin) as slow, Forked(lambda: learn(buffer)):
        eventually(lambda: begun[0])
        if stopped:
            slow.signal(signal.SIGSTOP)
            eventually(lambda: state_of(slow.pid) == "T")
        with Forked(go_on):
            eventually(lambda: any(p.waiting for p in live.snapshot().alive("writer")))
            found = said(after_waits(live, "insert_wait", 2.0))
    if stopped:
        assert found["silent"] == (
            f"Process {slow.pid}, a writer, is stopped, and its unfinished episode leaves the other writers no room: "
            f"continue it with `kill -CONT {slow.pid}`."
        )
        assert not {"held back", "starving"} & found.keys()
    else:
        assert (
            f"an unfinished episode of process {slow.pid} has the oldest row. See whether it hangs"
            in found["held back"]
        )


def learn(buffer):
    for _ in tr.ReplayDataset(buffer, 1):
        pass


def test_items_that_a_queue_drops():
    buffer = queue(when_full="drop_oldest")

    def outrun():
        for _ in range(10):
            write(buffer, 100)
            buffer.sample(60)

    with look_at(buffer) as live:
        text = said(after(live, outrun))["dropped"]
        share = live.snapshot().dropped_items / live.snapshot().inserted
    assert text.startswith(f"{100 * share:.0f} % of the items are dropped before they are drawn: draw faster, enlarge")
    assert 0.3 < share <= 0.4


def test_a_queue_that_is_well():
    buffer = queue()

    def work():
        for _ in range(20):
            write(buffer, 50)
            buffer.sample(50)

    with look_at(buffer) as live:
        assert said(after(live, work)) == {}


@pytest.mark.parametrize(("waited", "is_said"), [(4.0, False), (8.0, True)])
def test_a_wait_for_room_in_a_queue_that_is_over_is_not_told(waited, is_said):
    buffer = queue()
    write(buffer, 100)
    with look_at(buffer) as live:
        now, timeline = live.snapshot(), Timeline()
        for ago, wait in ((10.0, 0.0), (6.0, 4.0), (0.0, waited)):
            timeline.add(replace(now, time=now.time - ago, insert_wait=wait))
        assert ("held back" in said(Findings(live, timeline))) == is_said
