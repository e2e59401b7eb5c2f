"""The questions, by name."""

from benchmarks.learning.cell import Question
from benchmarks.learning.questions.cliffwalk import CLIFFWALK
from benchmarks.learning.questions.explorers import EXPLORERS
from benchmarks.learning.questions.hindsight import HINDSIGHT
from benchmarks.learning.questions.initial import INITIAL, INITIAL_ACROBOT
from benchmarks.learning.questions.recurrent import RECURRENT
from benchmarks.learning.questions.resume import RESUME
from benchmarks.learning.questions.sb3 import PEERS
from benchmarks.learning.questions.settings import SETTINGS
from benchmarks.learning.questions.staleness import STALENESS
from benchmarks.learning.questions.tianshou import TIANSHOU

QUESTIONS: dict[str, Question] = {
    question.name: question
    for question in (
        PEERS,
        TIANSHOU,
        CLIFFWALK,
        INITIAL,
        INITIAL_ACROBOT,
        *SETTINGS,
        STALENESS,
        RECURRENT,
        HINDSIGHT,
        RESUME,
        EXPLORERS,
    )
}

__all__ = ["QUESTIONS"]
