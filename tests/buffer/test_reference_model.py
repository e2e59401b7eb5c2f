"""Linked buffers against the reference model: after any writes in any order, both draw the same items."""

import threading

import pytest
import reference_model as model
from hypothesis import settings
from hypothesis import strategies as st
from linked_machine import LinkedBufferAgainstModel

import torchreplay as tr


@st.composite
def transitions(draw, fields, observation):
    frames = st.dictionaries(st.sampled_from([n for n in fields if model.are(n, observation)]), st.integers(1, 5))
    arguments = {"n_step": draw(st.integers(1, 6)), "gamma": draw(st.sampled_from([0.0, 0.5, 1.0]))}
    arguments |= {"observation": observation, "stack": draw(frames)}
    if "option/discount" in fields:
        arguments["discount"] = draw(st.sampled_from([None, "option/discount"]))
    return tr.Transitions(**arguments), model.Transitions(**arguments)


@st.composite
def sequences(draw, fields, observation):
    states = [name for name in fields if name.startswith("state")]
    arguments = {"length": draw(st.integers(1, 6)), "burn_in": draw(st.integers(0, 3))}
    arguments |= {"observation": observation, "stride": draw(st.none() | st.integers(1, 7))}
    arguments["partial"] = draw(st.booleans())
    arguments["initial"] = draw(st.lists(st.sampled_from(states), unique=True)) if states else []
    return tr.Sequences(**arguments), model.Sequences(**arguments)


@st.composite
def sequences_across_episodes(draw, fields, observation):
    states = [name for name in fields if name.startswith("state")]
    arguments = {"length": draw(st.integers(1, 6)), "burn_in": draw(st.integers(0, 2)), "observation": observation}
    arguments["initial"] = states if draw(st.booleans()) else []
    return tr.Sequences(**arguments, across_episodes=True), model.SequencesAcrossEpisodes(**arguments)


def machine(views, max_examples, stateful_step_count):
    """A test of one kind of view."""
    checked = type(views.__name__, (LinkedBufferAgainstModel,), {"views": staticmethod(views)}).TestCase
    checked.settings = settings(max_examples=max_examples, stateful_step_count=stateful_step_count, deadline=None)
    return pytest.mark.usefixtures("alone")(checked)


@pytest.fixture
def alone(monkeypatch):
    """As in a program of one thread, also if other tests have left threads: a draw that waits then says so at once."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


class TestTransitionsAgainstReferenceModel(machine(transitions, 60, 20)):
    """Collected by pytest."""


class TestSequencesAgainstReferenceModel(machine(sequences, 80, 20)):
    """Collected by pytest."""


class TestSequencesAcrossEpisodesAgainstReferenceModel(machine(sequences_across_episodes, 50, 20)):
    """Collected by pytest."""


@pytest.mark.soak
@pytest.mark.timeout(1800)
class TestTransitionsAgainstReferenceModelForLong(machine(transitions, 2000, 50)):
    """Collected by pytest."""


@pytest.mark.soak
@pytest.mark.timeout(1800)
class TestSequencesAgainstReferenceModelForLong(machine(sequences, 1500, 50)):
    """Collected by pytest."""


@pytest.mark.soak
@pytest.mark.timeout(1800)
class TestSequencesAcrossEpisodesAgainstReferenceModelForLong(machine(sequences_across_episodes, 1000, 50)):
    """Collected by pytest."""
