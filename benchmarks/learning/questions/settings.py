"""What a setting changes: DQN with prioritized replay on CartPole-v1, one setting at a time."""

from functools import partial
from typing import Any

from stable_baselines3 import DQN

from benchmarks.learning.cell import Question
from benchmarks.learning.questions.sb3 import CARTPOLE, EPISODES, Learner, learn
from torchreplay.compat.sb3 import PrioritizedDQN

STEPS = 20_000
TRAIN_FREQ = 64
SETTINGS_OF_ALL: dict[str, Any] = CARTPOLE | {
    "batch_size": TRAIN_FREQ,  # so that samples per insert are the gradient steps of a training
    "train_freq": TRAIN_FREQ,
    "gradient_steps": 32,
    "exploration_fraction": 0.3,
}


def _question(name: str, title: str, variants: dict[str, tuple[Learner, dict[str, Any]]]) -> Question:
    plays = {
        variant: partial(learn, env="CartPole-v1", learner=learner, steps=STEPS, settings=SETTINGS_OF_ALL | settings)
        for variant, (learner, settings) in variants.items()
    }
    return Question(
        name, title, "environment steps", f"mean return of {EPISODES} greedy episodes", {"DQN CartPole-v1": plays}
    )


def _alpha(alpha: float) -> tuple[Learner, dict[str, Any]]:
    return PrioritizedDQN, {"replay_buffer_kwargs": {"alpha": alpha}}


SETTINGS = (
    _question(
        "alpha",
        "How strongly TD errors are preferred",
        {"uniform": (DQN, {}), "alpha 0.4": _alpha(0.4), "alpha 0.6": _alpha(0.6), "alpha 1": _alpha(1.0)},
    ),
    _question(
        "n_step",
        "Steps that a return spans",
        {f"n = {n}": (PrioritizedDQN, {"n_steps": n}) for n in (1, 3, 5)},
    ),
    _question(
        "samples_per_insert",
        "How often each transition is drawn on average",
        {f"{n} per insert": (PrioritizedDQN, {"gradient_steps": n}) for n in (1, 4, 16, 64)},
    ),
)
