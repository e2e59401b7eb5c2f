"""An ordinary LightningModule, a buffer whose rows name themselves, and how to train the one from the other."""

import torch

import torchreplay as tr
from torchreplay.lightning import PriorityFeedback, ReplayDataModule

ROWS = 64
BARE = {"barebones": True, "accelerator": "cpu", "devices": 1}
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def filled_buffer(capacity=ROWS, sampler=None, ragged=False):
    """A buffer whose row with key k holds the number k; alpha = 1, so probability is |td| over the sum.

    `ragged`: it holds k elements, too.
    """
    spec = {"number": tr.Field((), torch.int64), "obs": tr.Field((4,))}
    more = {"spec": spec | {"words": tr.Ragged(torch.int32)}, "ragged_bytes": 1 << 20} if ragged else {"spec": spec}
    buffer = tr.ReplayBuffer(**more, capacity=capacity, sampler=sampler or tr.Prioritized(alpha=1.0), seed=3)
    words = {"words": [[k] * k for k in range(ROWS)]} if ragged else {}
    buffer.extend(number=torch.arange(ROWS), obs=torch.ones(ROWS, 4), **words)
    return buffer


def td_of(key):
    """The TD error that every training step below reports for a row; it names the row."""
    return 1.0 + key


def make_learner(lightning, returned=None, manual=False, **methods):
    """An ordinary LightningModule; `returned(loss, td, step)` is what its training step returns."""

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["key"].tolist())
        loss = (batch["weight"] * self.q(batch["obs"].to(self.q.weight.dtype))[:, 0] ** 2).mean()
        if manual:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        td = td_of(batch["number"].to(loss.dtype)) + 0 * loss  # carries a gradient, as a user's may
        return returned(loss, td, len(self.seen)) if returned else {"loss": loss, "td_error": td}

    class Learner(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.q = torch.nn.Linear(4, 1)
            self.automatic_optimization = not manual
            self.seen = []

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    Learner.training_step = training_step
    for name, method in methods.items():
        setattr(Learner, name, method)
    return Learner()


def make_td3_learner(lightning):
    """A learner whose critic steps after each batch, and whose actor after every second, as in TD3."""

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["key"].tolist())
        for delay, optimizer in enumerate(self.optimizers(), 1):
            if batch_idx % delay == 0:
                optimizer.zero_grad()
                self.manual_backward(self.q(batch["obs"]).square().mean())
                optimizer.step()
        return {"td_error": td_of(batch["number"].float())}

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=1e-3) for _ in range(2)]

    return make_learner(lightning, manual=True, training_step=training_step, configure_optimizers=configure_optimizers)


def fit(lightning, buffer, learner=None, callbacks=(), steps_per_epoch=None, batch_size=8, **trainer):
    """Trains and returns the trainer; priorities are fed back."""
    learner = learner or make_learner(lightning)
    data = buffer
    if not isinstance(data, ReplayDataModule):
        data = ReplayDataModule(buffer, batch_size, steps_per_epoch=steps_per_epoch)
    trainer = lightning.Trainer(callbacks=[PriorityFeedback(), *callbacks], **{**BARE, **trainer})
    trainer.fit(learner, datamodule=data)
    return trainer
