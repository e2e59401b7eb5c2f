"""Files of transitions: ours and cpprb's, read by either kind of buffer, and nothing run that a file says."""

import io
import os
import pickle

import cpprb
import numpy as np
import pytest

from torchreplay.compat import cpprb as adapter

ENV = {"obs": {"shape": (2, 3)}, "act": {"dtype": np.int16}, "rew": {}, "next_obs": {"shape": (2, 3)}, "done": {}}
STEPS = {"size": 3, "rew": "rew", "gamma": 0.5, "next": "next_obs"}


def filled(library, n=7, env=ENV, **options):
    buffer = library.ReplayBuffer(8, env, **options)
    for i in range(n):
        buffer.add(
            obs=np.arange(6).reshape(2, 3) + i, act=i, rew=i, next_obs=np.arange(6).reshape(2, 3) + i + 1, done=0
        )
        if i in (3, 6):
            buffer.on_episode_end()
    return buffer


def same(ours, theirs):
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        assert ours[name].dtype == values.dtype, name
        np.testing.assert_array_equal(ours[name], values, err_msg=name)


SHARING = {
    "rows": {},
    "next_of": {"next_of": "obs"},
    "stack": {"stack_compress": "obs"},
    "next_of, stack": {"next_of": "obs", "stack_compress": "obs"},
    "n steps": {"Nstep": STEPS},
}


def env_of(kind):
    return {name: defs for name, defs in ENV.items() if name != "next_obs" or "next_of" not in kind}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("kind", SHARING)
def test_what_was_saved_is_added_again(kind, safe, tmp_path):
    buffer = filled(adapter, env=env_of(kind), **SHARING[kind])
    buffer.save_transitions(tmp_path / "rows.npz", safe=safe)
    other = adapter.PrioritizedReplayBuffer(8, env_of(kind), **SHARING[kind])
    other.load_transitions(tmp_path / "rows.npz")
    same(other.get_all_transitions(), buffer.get_all_transitions())


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("n", [5, 7, 13])
@pytest.mark.parametrize("kind", ["rows", "next_of", "stack", "next_of, stack"])
def test_files_of_cpprb_are_read(kind, n, safe, tmp_path):
    buffer = filled(cpprb, n, env_of(kind), **SHARING[kind])
    buffer.save_transitions(str(tmp_path / "rows.npz"), safe=safe)
    ours = adapter.ReplayBuffer(8, env_of(kind), **SHARING[kind])
    ours.load_transitions(tmp_path / "rows.npz")
    same(ours.get_all_transitions(), buffer.get_all_transitions())


def test_n_step_files_of_cpprb_are_read(tmp_path):
    buffer = filled(cpprb, Nstep=STEPS)
    buffer.save_transitions(str(tmp_path / "rows.npz"))
    ours = adapter.ReplayBuffer(8, ENV, Nstep=STEPS)
    ours.load_transitions(tmp_path / "rows.npz")
    same(ours.get_all_transitions(), buffer.get_all_transitions())


def test_a_file_object_will_do():
    file = io.BytesIO()
    buffer = filled(adapter)
    buffer.save_transitions(file)
    file.seek(0)
    other = adapter.ReplayBuffer(8, ENV)
    other.add(obs=np.ones(6), act=50, rew=50, next_obs=np.ones(6), done=1)
    other.load_transitions(file)
    assert other.get_all_transitions()["act"].ravel().tolist() == [50, *range(7)]


@pytest.mark.parametrize("library", [adapter, cpprb])
def test_n_step_transitions_and_others_are_told_apart(library, tmp_path):
    for saved, options in (({}, {"Nstep": STEPS}), ({"Nstep": STEPS}, {})):
        filled(library, **saved).save_transitions(str(tmp_path / "rows.npz"))
        with pytest.raises(ValueError, match=r"(?i)n-?step"):
            adapter.ReplayBuffer(8, ENV, **options).load_transitions(tmp_path / "rows.npz")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made-by-the-file",)


def evil_array():
    array = np.empty((), object)
    array[()] = {"obs": Evil()}
    return array


@pytest.mark.parametrize("content", ["evil", "text", "other", "later"])
def test_other_files_are_refused_and_nothing_in_them_runs(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rows.npz"
    if content == "evil":
        np.savez(file, safe=True, version=1, Nstep=False, cache=None, next_of=None, data=evil_array())
    elif content == "text":
        file.write_text("no file of arrays")
    elif content == "other":
        np.savez(file, a=1)
    else:
        np.savez(file, safe=True, version=2, Nstep=False)
    with pytest.raises((ValueError, pickle.UnpicklingError)):
        adapter.ReplayBuffer(8, ENV).load_transitions(file)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npz"]
