"""`EvaluationMonitor`: an evaluator that runs for as long as `fit` does, and its results in the Trainer's loggers."""

import importlib

import pytest
import torch

import torchreplay as tr

pytest.importorskip("pytorch_lightning")

import pytorch_lightning
from gloo_ranks import run_ranks
from lightning_learner import QUIET, filled_buffer, fit, make_learner

from torchreplay.lightning import EvaluationMonitor, ReplayDataModule, WeightPublisher, evaluation
from torchreplay.ray import Evaluation, Evaluator, EvaluatorFailed

# Lightning's own, under a torch newer than it knows.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


def evaluate(module, seed):
    return [module.weight.sum().item() + spread for spread in (-1.0, 1.0)]


def make_module():
    return torch.nn.Linear(4, 1)


def keeping_logger(lightning):
    """A logger of that library that keeps what it is given, as (step, metrics)."""
    base = importlib.import_module(f"{lightning.__name__}.loggers").Logger

    class Keeping(base):
        name, version = "keeping", 0

        def __init__(self):
            super().__init__()
            self.logged = []

        def log_metrics(self, metrics, step=None):
            self.logged.append((step, dict(metrics)))

        def log_hyperparams(self, *_, **__):
            pass

    return Keeping()


@pytest.mark.slow
def test_results_reach_the_loggers_and_the_last_weights_are_evaluated_at_the_end(lightning):
    learner, logger = make_learner(lightning), keeping_logger(lightning)
    weights = tr.SharedWeights(learner.q)
    evaluator = Evaluator(evaluate, weights, make_module, every_seconds=0, backend="process")
    seen = []

    class Wait(lightning.Callback):
        """Lets training wait for the first result, and looks at what it leaves behind."""

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                evaluator.wait(timeout=150)
            if trainer.global_step > 3 and evaluator.evaluations:
                seen.append(trainer.progress_bar_metrics.get("evaluation/mean_return"))

    callbacks = [Wait(), WeightPublisher(weights, every=1, module="q"), EvaluationMonitor(evaluator)]
    with filled_buffer() as buffer:
        trainer = fit(
            lightning, buffer, learner, callbacks, **{**QUIET, "barebones": False, "logger": logger}, max_steps=200
        )
    assert evaluator.stats().state == "stopped"
    logged = [(step, metrics) for step, metrics in logger.logged if "evaluation/version" in metrics]
    assert [metrics["evaluation/version"] for _, metrics in logged] == [e.version for e in evaluator.evaluations]
    step, last = logged[-1]
    assert step == trainer.global_step == 200
    assert last["evaluation/version"] == weights.version
    assert last["evaluation/mean_return"] == pytest.approx(learner.q.weight.sum().item(), abs=1e-6)
    assert (last["evaluation/std_return"], last["evaluation/episodes"]) == (1.0, 2.0)
    means = {e.mean_return for e in evaluator.evaluations}
    assert any(mean == pytest.approx(value, abs=1e-5) for mean in means for value in seen if value is not None)


class ScriptedEvaluator(Evaluator):
    """An evaluator whose results come when a test says so."""

    def __init__(self):
        self.results = []

    @property
    def evaluations(self):
        return tuple(self.results)

    def find(self, mean):
        self.results.append(Evaluation(len(self.results), 1, mean, 0.0, mean, mean, 0.1, True))

    def start(self):
        return self

    def stop(self):
        pass

    def check(self):
        pass


def test_a_result_has_the_step_of_the_trainers_own_metrics(lightning, monkeypatch):
    def training_step(self, batch, batch_idx):
        self.log("own", float(batch_idx))
        evaluator.find(float(batch_idx))
        self.manual_backward(self.q(batch["obs"]).square().mean())
        for optimizer in self.optimizers():
            optimizer.step()
        return {"td_error": batch["weight"]}

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=1e-3) for _ in range(2)]

    monkeypatch.setattr(evaluation, "_LOOK_EVERY", 0)
    evaluator, logger = ScriptedEvaluator(), keeping_logger(lightning)
    methods = {"training_step": training_step, "configure_optimizers": configure_optimizers}
    learner = make_learner(lightning, manual=True, **methods)
    options = {**QUIET, "barebones": False, "logger": logger, "log_every_n_steps": 1}
    with filled_buffer() as buffer:
        fit(lightning, buffer, learner, [EvaluationMonitor(evaluator, last=False)], max_steps=10, **options)
    own, ours = (
        [(step, metrics[name]) for step, metrics in logger.logged if name in metrics]
        for name in ("own", "evaluation/mean_return")
    )
    assert ours == own == [(step, step) for step in range(5)]


def test_all_ranks_get_the_mean_at_the_same_steps_and_monitor_it(tmp_path):
    library = pytorch_lightning

    def body(rank):
        evaluator, seen = ScriptedEvaluator(), []

        class Script(library.Callback):
            def on_train_batch_start(self, trainer, *_):
                if rank == 0 and trainer.global_step in (3, 6):
                    evaluator.find(float(trainer.global_step))

            def on_train_batch_end(self, trainer, *_):
                mean = trainer.callback_metrics.get("evaluation/mean_return")
                seen.append(None if mean is None else mean.item())

        best = library.callbacks.ModelCheckpoint(
            tmp_path, monitor="evaluation/mean_return", mode="max", every_n_train_steps=2
        )
        stopping = library.callbacks.EarlyStopping("evaluation/mean_return", mode="max", strict=False, patience=1)
        options = {**QUIET, "barebones": False, "devices": 2, "strategy": "ddp", "log_every_n_steps": 3}
        callbacks = [EvaluationMonitor(evaluator, last=False), Script(), best, stopping]
        data = ReplayDataModule(filled_buffer, 8, steps_per_epoch=4)
        fit(library, data, None, callbacks, max_epochs=9, **options | {"enable_checkpointing": True})
        return [seen, best.best_model_score.item(), stopping.best_score.item()]

    ranks = [outcome["value"] for outcome in run_ranks(tmp_path, body)]
    # Shared by the steps 3, 4, 6, 8, 9 and 12, of which 4, 8 and 12 end epochs; the third epoch brings nothing better.
    assert ranks == [[[None] * 3 + [3.0] * 4 + [6.0] * 5, 6.0, 6.0]] * 2


@pytest.mark.slow
def test_fit_ends_when_the_evaluator_has_failed(lightning):
    def raise_always(module, seed):
        raise KeyError("no such level")

    learner = make_learner(lightning)
    weights = tr.SharedWeights(learner.q)
    evaluator = Evaluator(raise_always, weights, make_module, every=1, max_restarts=0, backend="process")
    with filled_buffer() as buffer, pytest.raises(EvaluatorFailed, match="no such level"):
        fit(lightning, buffer, learner, [EvaluationMonitor(evaluator)], **{**QUIET, "barebones": False}, max_steps=-1)
    assert evaluator.stats().state == "failed"
