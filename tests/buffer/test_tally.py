"""The counts at the end of a run: what kind of failure a failed test is."""

import pytest
from forked import Hang, eventually
from tally import kind_of

import torchreplay as tr


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Hang("the awaited condition did not come about"), "hang"),
        (tr.ReplayTimeout("no batch within 30 s"), "hang"),
        (AssertionError("torn row\nassert False"), "torn row"),
        (AssertionError("foreign row: a key names another row than its writer was told"), "foreign row"),
        (AssertionError("stale TD error: applied 3 times"), "stale TD error"),
        (AssertionError("lost slot\nassert 15 == 16"), "lost slot"),
        (ValueError("something else"), "other failure"),
    ],
)
def test_a_failure_is_counted_as_the_promise_it_breaks(error, kind):
    assert kind_of(error) == kind


def test_a_test_that_takes_too_long_counts_as_a_hang():
    with pytest.raises(pytest.fail.Exception) as timeout:
        pytest.fail("Timeout (>180.0s) from pytest-timeout.")
    assert kind_of(timeout.value) == "hang"


def test_what_does_not_come_about_is_a_hang():
    with pytest.raises(Hang):
        eventually(lambda: False, timeout=0)
