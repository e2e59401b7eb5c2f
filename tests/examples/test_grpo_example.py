"""GRPO's example runs, its parts are what they are called, and no death loses a rollout."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest
import torch
from child_processes import explorers_of
from example_programs import EXAMPLES, assert_tensorboard_says, evaluations, imported, succeed
from forked import Forked

import torchreplay as tr
from torchreplay.explorers import ExplorerContext

QUICK = "--layers 1 --batch-size 32 --eval-tasks 10 --solved-at 1.1 --seed 7"

pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture
def grpo(monkeypatch):
    return imported("grpo", monkeypatch)


@contextmanager
def started(directory, *flags):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(EXAMPLES / "grpo.py"), *flags], cwd=directory, **pipes) as program:
        try:
            yield program
        finally:
            program.kill()


@contextmanager
def exploring(grpo, queue, weights, args):
    """Runs a generator in a thread, until its block ends."""

    def run():
        with suppress(tr.Stopped):
            grpo.explore(ExplorerContext(queue, weights, seed=5), args)

    with queue.expect_writers():
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            queue.stop()
            thread.join()


@pytest.mark.parametrize(
    ("task", "answer", "reward"),
    [
        ([3, 1], [1, 3, 11], 1.0),
        ([3, 1], [1, 3, 3], 2 / 3),
        ([3, 1], [1, 11], 1 / 3),
        ([3, 1], [3, 3, 11], 0.0),
        ([9, 2, 2], [2, 2, 9, 11], 1.0),
        ([9, 2, 2], [11], 0.0),
    ],
)
def test_the_reward_is_the_share_of_the_right_answer_before_the_first_wrong_token(grpo, task, answer, reward):
    assert grpo.reward_of(task, answer) == pytest.approx(reward)


def test_a_row_has_the_task_and_an_answer_and_the_log_probabilities_that_the_policy_gave_to_it(grpo):
    torch.manual_seed(1)
    policy, dice = grpo.Policy(1), random.Random(2)
    tasks = [grpo.random_task(dice) for _ in range(60)]
    assert {len(task) for task in tasks} == {2, 3}
    rows = grpo.answered(policy, tasks)
    for task, row in zip(tasks, rows, strict=True):
        tokens, begin = row["tokens"].tolist(), len(task) + 1
        assert tokens[:begin] == [*task, grpo.EQUALS]
        assert row["is_answer"].tolist() == [False] * begin + [True] * (len(tokens) - begin)
        assert grpo.END not in tokens[:-1]
        assert tokens[-1] == grpo.END or len(tokens) == 2 * begin
        assert row["reward"] == grpo.reward_of(task, tokens[begin:])
        for place in range(len(tokens)):  # one after the other, each row by itself
            expected = 0.0
            if place >= begin:
                logits = policy(row["tokens"][None, :place])[0, -1]
                expected = torch.distributions.Categorical(logits=logits).log_prob(row["tokens"][place]).item()
            assert row["log_prob"][place].item() == pytest.approx(expected, abs=1e-4)
    assert len({len(row["tokens"]) for row in rows}) > 3
    greedy = grpo.answered(policy, tasks, greedy=True)
    first = [policy(torch.tensor([[*task, grpo.EQUALS]]))[0, -1].argmax().item() for task in tasks]
    assert [row["tokens"][len(task) + 1].item() for task, row in zip(tasks, greedy, strict=True)] == first


def test_advantages_are_the_standard_scores_within_each_group_however_many_members_it_has(grpo):
    reward, group = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.75, 0.3]), torch.tensor([0, 0, 1, 0, 1, 2])
    found = grpo.advantages(reward, group)
    for members in ([0, 1, 3], [2, 4], [5]):
        of = reward[members]
        expected = (of - of.mean()) / (of.std(correction=0) + 1e-2)
        torch.testing.assert_close(found[members], expected)


@pytest.fixture
def batch(grpo):
    """A batch of two groups of a small policy: (args, the policy, the batch)."""
    torch.manual_seed(3)
    args = grpo.Args(layers=1, batch_size=16, max_age=1)
    policy, queue = grpo.Policy(1), grpo.queue_of(args)
    weights = tr.SharedWeights(policy)
    with exploring(grpo, queue, weights, args):
        drawn = next(iter(tr.GroupDataset(queue, by="prompt", size=8, groups=2)))
    return args, policy, drawn


def test_of_the_policy_s_own_answers_the_loss_is_minus_the_mean_advantage_of_their_tokens(grpo, batch):
    args, policy, batch = batch
    advantage = grpo.advantages(batch["reward"], batch["group"])
    offsets = batch.offsets("tokens").tolist()
    tokens = torch.stack([batch["is_answer"][a:b].sum() for a, b in pairwise(offsets)])
    expected = -(advantage * tokens).sum() / tokens.sum()
    assert grpo.loss_of(policy, batch, args).item() == pytest.approx(expected.item(), abs=1e-4)


def test_a_group_has_one_task_and_the_next_one_another(grpo, batch):
    _, _, batch = batch
    tasks = [tokens[: tokens.tolist().index(grpo.EQUALS)].tolist() for tokens in batch.nested("tokens").unbind()]
    assert batch["group"].tolist() == [0] * 8 + [1] * 8
    assert len(batch["prompt"].unique()) == 2
    assert tasks == [tasks[0]] * 8 + [tasks[8]] * 8


def test_admission_lets_generators_begin_as_much_as_will_be_in_time(grpo):
    args = grpo.Args(layers=1, batch_size=16, max_age=1)
    policy = grpo.Policy(1)
    queue, weights = grpo.queue_of(args), tr.SharedWeights(policy)
    batches = iter(tr.GroupDataset(queue, by="prompt", size=8, groups=2))
    with exploring(grpo, queue, weights, args):
        for version in range(1, 6):
            batch = next(batches)
            assert batch["age"].max() <= 1
            assert queue.stats().rows_written <= (args.max_age + version) * 16
            queue.commit()
            queue.policy_version = weights.publish(policy)


@pytest.mark.slow
def test_a_killed_learner_goes_on_from_its_model_with_the_same_rollouts_and_the_same_losses(grpo, tmp_path):
    args = grpo.Args(layers=1, batch_size=16, max_age=5, directory=tmp_path)
    dice, generator = random.Random(4), grpo.Policy(1)
    with grpo.queue_of(args) as queue, queue.writer() as writer:
        for prompt in range(12):  # six batches of two groups
            with writer.admit(8), torch.no_grad():
                for row in grpo.answered(generator, [grpo.random_task(dice)] * 8):
                    writer.append(
                        prompt=prompt, **{**row, "reward": dice.random()}
                    )  # each group has something to learn

    def learn(first, died):
        """Learns until step 6; saves the model after step 3, as the example does."""
        torch.set_num_threads(1)
        policy, losses = grpo.Policy(1), []
        policy.load_state_dict(generator.state_dict())
        with grpo.queue_of(args) as queue:
            batches = tr.GroupDataset(queue, by="prompt", size=8, groups=2)
            optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
            if first > 1:
                saved = torch.load(tmp_path / "model.pt")
                policy.load_state_dict(saved["policy"])
                optimizer.load_state_dict(saved["optimizer"])
                batches.load_state_dict(saved["batches"])
            for step, batch in zip(range(first, 7), batches, strict=False):
                loss = grpo.loss_of(policy, batch, args)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append((step, loss.item(), batch["prompt"].tolist()))
                if step == 3 and first == 1:
                    saved = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(saved | {"batches": batches.state_dict()}, tmp_path / "model.pt")
                    queue.commit()
            torch.save(losses, tmp_path / f"losses from {first}.pt")
            if died:
                os.kill(os.getpid(), signal.SIGKILL)

    for first in (1, 4):
        with Forked(lambda first=first: learn(first, first == 1)) as learner:
            assert learner.wait() == (-signal.SIGKILL if first == 1 else 0)
    whole, resumed = (torch.load(tmp_path / f"losses from {first}.pt") for first in (1, 4))
    assert [step for step, _, _ in whole] == [1, 2, 3, 4, 5, 6]
    assert len({loss for _, loss, _ in whole}) == 6
    assert resumed == whole[3:]


@pytest.mark.slow
def test_a_killed_program_goes_on_from_its_queue_and_its_model_and_a_killed_generator_is_started_again(tmp_path):
    flags = [*QUICK.split(), "--directory", "run", "--save-every", "2", "--eval-every", "4", "--total-steps"]
    with started(tmp_path, *flags, "1000000") as first:
        lines = [json.loads(first.stdout.readline())]
        os.kill(explorers_of(first.pid)[0], signal.SIGKILL)
        lines += [json.loads(first.stdout.readline()) for _ in range(2)]
        first.kill()
        first.wait()
    saved = torch.load(tmp_path / "run" / "model.pt")["step"]
    assert saved >= 12
    with tr.ReplayBuffer.open(tmp_path / "run" / "rollouts") as queue:
        before = queue.stats()
    last = saved + 4 - saved % 4
    more = evaluations(succeed("grpo", tmp_path, *flags, str(last), timeout=150))
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert [line["step"] for line in more] == [last]
    with tr.ReplayBuffer.open(tmp_path / "run" / "rollouts") as queue:
        after = queue.stats()
    assert after.rows_written >= before.rows_written
    assert after.expired_items == after.dropped_items == 0
    # Each batch has 32 answers. The group of the killed generator may lack some, and one may have been half written.
    assert -1 <= 32 * last - (after.rows_written - after.drawable) < 8


@pytest.mark.slow
def test_it_runs_and_tensorboard_reads_back_what_the_lines_said(tmp_path):
    flags = [*QUICK.split(), "--total-steps", "4", "--eval-every", "2", "--max-age", "0"]
    lines = evaluations(succeed("grpo", tmp_path, *flags, timeout=150))
    assert [(line["step"], line["oldest"], line["solved"]) for line in lines] == [(2, 0, False), (4, 0, False)]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert_tensorboard_says(lines, tmp_path / "runs" / "grpo-seed7")


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(5))
def test_it_learns_to_sort_within_three_minutes(seed, tmp_path):
    last = evaluations(succeed("grpo", tmp_path, "--seed", str(seed), "--no-tensorboard", timeout=180))[-1]
    assert last["solved"]
    assert last["mean_return"] >= 0.99
