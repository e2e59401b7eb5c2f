"""Calls that a thread makes, one after the other."""

import threading

import pytest
from forked import Forked, eventually

pytest.importorskip("ray")
from torchreplay.ray.runtime.errands import Errands

SECONDS = 60
pytestmark = pytest.mark.timeout(120)


def threads():
    return [thread.name for thread in threading.enumerate()]


def test_errands_are_made_in_their_order_by_a_thread_that_ends():
    errands, made = Errands("errands"), []
    for k in range(200):
        errands.add(lambda k=k: made.append((k, threading.current_thread().name)))
    eventually(lambda: made == [(k, "errands") for k in range(200)])
    eventually(lambda: "errands" not in threads())
    errands.add(lambda: made.append(None))
    eventually(lambda: len(made) == 201)


def test_errands_of_many_threads_are_each_made_once():
    errands, made = Errands("errands"), []
    adding = [
        threading.Thread(target=lambda k=k: [errands.add(lambda i=i: made.append((k, i))) for i in range(500)])
        for k in range(4)
    ]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    eventually(lambda: sorted(made) == [(k, i) for k in range(4) for i in range(500)])
    assert all([i for j, i in made if j == k] == list(range(500)) for k in range(4))


def test_a_forked_child_has_none_of_its_parents_errands():
    errands, made, go_on = Errands("errands"), [], threading.Event()
    errands.add(go_on.wait)
    errands.add(lambda: made.append("parent"))

    def child():
        errands.add(lambda: made.append("child"))
        eventually(lambda: made == ["child"])

    with Forked(child) as forked:
        assert forked.wait(SECONDS) == 0
    go_on.set()
    eventually(lambda: made == ["parent"])
