"""How `fit` ends when its buffer was stopped: by itself, Lightning would begin one empty epoch after the other."""

from __future__ import annotations

from typing import Any

from torchreplay.errors import Stopped


def end_fit(trainer: Any) -> None:
    """Has `fit` end with this epoch, whose stream has ended because the buffer was stopped."""
    trainer.should_stop = True


def refuse_epoch(trainer: Any) -> None:
    """Looks at an epoch that begins although the buffer was stopped: a single one, which `end_fit` ends, may be empty.

    Raises:
        Stopped: There was one; the Trainer goes on because of its `min_steps` or `min_epochs`. Or there are several
            ranks, which do not come to the end of the stream at the same step.
    """
    if trainer.world_size > 1:
        raise stopped_among_ranks()
    if trainer.should_stop:
        raise Stopped(
            f"the buffer was stopped, so that no batch will come after step {trainer.global_step}, and the Trainer is "
            f"to make more: it has min_steps={trainer.min_steps} and min_epochs={trainer.min_epochs}"
        )


def stopped_among_ranks() -> Stopped:
    """Returns what ends each of several ranks."""
    return Stopped("the buffer was stopped while several ranks train from it; stop it after `fit` has ended")
