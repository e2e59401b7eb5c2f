"""A recorder of an environment as Gymnasium knows environments: its wrappers take it as they take the environment."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv, VectorWrapper

from torchreplay.checking.loop_recording import EnvRecorder


class RecordedEnv(gymnasium.Wrapper):
    """An environment whose steps and resets are recorded. It has all attributes of the environment."""

    def __init__(self, recorder: EnvRecorder) -> None:
        super().__init__(recorder.env)
        self._recorder = recorder

    def reset(self, **arguments: Any) -> Any:
        """Resets the environment."""
        return self._recorder.reset(**arguments)

    def step(self, action: Any) -> Any:
        """Steps the environment."""
        return self._recorder.step(action)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


class RecordedVectorEnv(VectorWrapper):
    """A vector environment whose steps and resets are recorded. It has all attributes of the environment."""

    def __init__(self, recorder: EnvRecorder) -> None:
        super().__init__(recorder.env)
        self._recorder = recorder

    def reset(self, **arguments: Any) -> Any:
        """Resets the environments."""
        return self._recorder.reset(**arguments)

    def step(self, actions: Any) -> Any:
        """Steps the environments."""
        return self._recorder.step(actions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


def recorded(recorder: EnvRecorder) -> RecordedEnv | RecordedVectorEnv | EnvRecorder:
    """Returns what a loop may use like the recorder's environment: an environment of Gymnasium, if that one is."""
    if isinstance(recorder.env, VectorEnv):
        return RecordedVectorEnv(recorder)
    return RecordedEnv(recorder) if isinstance(recorder.env, gymnasium.Env) else recorder
