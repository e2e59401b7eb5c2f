"""GRPO: a small language model learns to sort digits from rewards alone, while other processes generate.

Group Relative Policy Optimization (Shao et al. 2024, https://arxiv.org/abs/2402.03300) of a transformer with a million
parameters. Generators answer each task eight times, and write each answer into a queue, as long as it is. The learner
is given whole groups, and compares the answers of a task with each other. It learns while the others generate, so
answers are of older policies. Admission bounds by how many versions, before a generator begins (`--max-age`).

A generator that raises or is killed is reported and started again. With `--directory` the queue is a file, and the
model is saved beside it. A program that is killed goes on from there: no answer is lost, or learned from twice.

    python examples/grpo.py --seed 1
    python examples/grpo.py --max-age 0        # strictly on-policy: learner and generators take turns
    torchreplay watch                          # from another terminal
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr
from torchreplay.explorers import ExplorerContext, ExplorerPool

EQUALS, END, TOKENS, MOST_DIGITS = 10, 11, 12, 3
"""Tokens behind a task and behind an answer, how many tokens there are with the digits, and digits of a task."""

SPEC = {
    "prompt": tr.Field((), torch.int64),  # a number that the answers of one group have, and no others
    "policy_version": tr.Field((), torch.int64),  # of the weights that answered; the writer fills it
    "tokens": tr.Ragged(torch.int32),  # the task and its answer
    "log_prob": tr.Ragged(torch.float32, like="tokens"),  # that the generator's policy gave to the answer's tokens
    "is_answer": tr.Ragged(torch.bool, like="tokens"),
    "reward": tr.Field(),
}


@dataclass
class Args:
    """GRPO on sorting two or three digits: generators in plain processes, a queue of rollouts, groups, admission."""

    seed: int = 0
    """seed of the model, the generators and the evaluations"""
    total_steps: int = 1_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 25
    """learner steps between two evaluations"""
    eval_tasks: int = 200
    """tasks of an evaluation, answered greedily"""
    solved_at: float = 0.99
    """share of right answers that ends the run"""
    directory: Path | None = None
    """keeps the queue and the saved model, and goes on with those that it has; None: nothing outlives the run"""
    save_every: int = 10
    """learner steps between two saves, with a directory"""
    tensorboard: bool = True
    """whether to write curves to runs/grpo-seed<seed>"""

    num_generators: int = 2
    """generator processes"""
    max_age: int = 4
    """versions by which an answer may be older than the policy that learns from it"""
    group_size: int = 8
    """answers to a task"""
    batch_size: int = 128
    """answers in a batch, in whole groups"""

    layers: int = 2
    """of the transformer, each 192 wide"""
    clip: float = 0.2
    """how far the ratio of the new policy to the old one may leave 1"""
    learning_rate: float = 3e-4
    """of Adam"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name in ("seed", "max_age") else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")
        if self.batch_size % self.group_size:
            raise ValueError(f"batch_size={self.batch_size}: expected whole groups of group_size={self.group_size}")


class Policy(nn.Module):
    """A causal transformer: tokens `[B, T]` to logits of the next ones, `[B, T, TOKENS]`."""

    def __init__(self, layers: int, width: int = 192) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.token, self.place = nn.Embedding(TOKENS, width), nn.Embedding(2 * MOST_DIGITS + 2, width)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits."""
        place, mask = torch.arange(tokens.shape[1]), nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.body(self.token(tokens) + self.place(place), mask=mask, is_causal=True))


def reward_of(task: list[int], answer: list[int]) -> float:
    """Returns how much of the right answer, the sorted digits and END, the given one begins with: a share."""
    right = [*sorted(task), END]
    same = [given == wanted for given, wanted in zip(answer, right, strict=False)]
    return [*same, False].index(False) / len(right)


def random_task(dice: random.Random) -> list[int]:
    """Returns two or three digits, all different."""
    return dice.sample(range(10), k=dice.randint(2, MOST_DIGITS))


@torch.no_grad()
def answered(policy: nn.Module, tasks: list[list[int]], *, greedy: bool = False) -> list[dict]:
    """Returns an answer to each task, as the fields of a row. It ends by END, or is as long as a right one would be."""
    begins = torch.tensor([len(task) + 1 for task in tasks])
    ends, open_rows = begins.clone(), torch.arange(len(tasks))
    tokens = torch.full((len(tasks), 2 * max(begins)), END)
    log_prob = torch.zeros(tokens.shape)
    for row, task in zip(tokens, tasks, strict=True):
        row[: len(task) + 1] = torch.tensor([*task, EQUALS])
    while len(open_rows):
        at = ends[open_rows]
        logits = policy(tokens[open_rows, : at.max()])[torch.arange(len(at)), at - 1]
        log_probs = logits.log_softmax(-1)
        token = logits.argmax(-1) if greedy else torch.multinomial(log_probs.exp(), 1).squeeze(-1)
        tokens[open_rows, at] = token
        log_prob[open_rows, at] = log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        ends[open_rows] += 1
        open_rows = open_rows[(token != END) & (at + 1 < 2 * begins[open_rows])]
    rows = []
    for task, begin, end, token, log_p in zip(tasks, begins, ends, tokens, log_prob, strict=True):
        reward = reward_of(task, token[begin:end].tolist())
        is_answer = torch.arange(end) >= begin
        rows.append({"tokens": token[:end], "log_prob": log_p[:end], "is_answer": is_answer, "reward": reward})
    return rows


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Answers tasks until the learner has finished; runs in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(ctx.seed)
    dice, policy = random.Random(ctx.seed), Policy(args.layers).requires_grad_(False)
    writer = ctx.writer()
    for count in itertools.takewhile(lambda _: not ctx.stopped, itertools.count()):
        with writer.admit(args.group_size):  # waits until what begins now will be used in time
            ctx.pull_weights(policy)
            for row in answered(policy, [random_task(dice)] * args.group_size):
                writer.append(prompt=ctx.seed << 31 | count, **row)  # no other group has this number


def advantages(reward: Tensor, group: Tensor) -> Tensor:
    """Returns by how many standard deviations each answer is better than those of its group, `[B]` as the arguments."""
    members = torch.bincount(group)
    centred = reward - (torch.bincount(group, reward) / members)[group]
    deviation = (torch.bincount(group, centred**2) / members).sqrt()
    return (centred / (deviation[group] + 1e-2)).float()


def loss_of(policy: nn.Module, batch: tr.ReplayBatch, args: Args) -> Tensor:
    """Returns the clipped loss, as the mean over all answers' tokens."""
    tokens = batch.padded("tokens", value=END).long()
    mask, old = batch.padded("is_answer")[:, 1:], batch.padded("log_prob")[:, 1:]
    new = policy(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    ratio, advantage = (new - old).exp(), advantages(batch["reward"], batch["group"])[:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage)
    return -gain[mask].mean()


def evaluate(policy: nn.Module, tasks: int, seed: int) -> float:
    """Returns the share of tasks whose greedy answer is right, all of it."""
    dice = random.Random(seed)
    rows = answered(policy, [random_task(dice) for _ in range(tasks)], greedy=True)
    return sum(row["reward"] == 1 for row in rows) / tasks


def queue_of(args: Args) -> tr.ReplayBuffer:
    """Returns the queue: the one that the directory has, or a new one."""
    os.makedirs(args.directory or ".", exist_ok=True)
    path = args.directory and args.directory / "rollouts"
    if path and path.exists():
        return tr.ReplayBuffer.open(path)
    room = args.batch_size * (args.save_every + args.max_age + 2)  # what is held until a save, and what is on its way
    how = {"sampler": tr.Fifo(commit="manual"), "limiter": tr.Admission(args.batch_size, args.max_age), "path": path}
    return tr.ReplayBuffer(SPEC, room, ragged_bytes=256 * room, name="rollouts", **how)


def learn(queue: tr.ReplayBuffer, args: Args) -> None:
    """Learns, with generators beside it, until an evaluation is good enough."""
    policy = Policy(args.layers)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate)
    groups, left = args.batch_size // args.group_size, {"min_size": 1, "timeout": 5.0}  # by a generator that died
    batches = tr.GroupDataset(queue, by="prompt", size=args.group_size, groups=groups, **left)
    done, oldest, began = 0, 0, time.monotonic()  # steps, versions, seconds
    path = args.directory and args.directory / "model.pt"
    if path and path.exists():
        saved = torch.load(path)
        policy.load_state_dict(saved["policy"])
        optimizer.load_state_dict(saved["optimizer"])
        batches.load_state_dict(saved["batches"])  # what this model has learned from does not come again
        done = saved["step"]
    curves = SummaryWriter(f"runs/grpo-seed{args.seed}", purge_step=done) if args.tensorboard else None
    monitor, weights = tr.Monitor(queue, curves), tr.SharedWeights(policy, version=queue.policy_version)
    work, seed = partial(explore, args=args), args.seed + weights.version  # other tasks than before a restart
    with ExplorerPool(work, args.num_generators, queue, weights, seed=seed):
        for step, batch in zip(range(done + 1, args.total_steps + 1), batches, strict=False):
            loss = loss_of(policy, batch, args)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            weights.publish(policy, buffer=queue)
            monitor.step(step)
            oldest = max(oldest, int(batch["age"].max()))
            if step % args.save_every == 0:
                if path:
                    saved = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(saved | {"batches": batches.state_dict()}, path.with_suffix(".new"))
                    os.replace(path.with_suffix(".new"), path)  # a whole model, or the one before
                queue.commit()  # only now: until here a death would bring back what was learned from
            if step % args.eval_every == 0:
                right = evaluate(policy, args.eval_tasks, args.seed)
                line = {"step": step, "mean_return": right, "oldest": oldest, "rows": queue.stats().rows_written}
                line |= {"seconds": round(time.monotonic() - began, 1), "solved": right >= args.solved_at}
                print(json.dumps(line), flush=True)
                if curves:
                    curves.add_scalar("charts/mean_return", right, step)
                    curves.flush()
                if line["solved"]:
                    return


def main(args: Args) -> None:
    """Learns to sort."""
    torch.set_num_threads(1)  # the model is small, and the generators want the other cores
    torch.manual_seed(args.seed)
    with queue_of(args) as queue:
        learn(queue, args)


if __name__ == "__main__":
    main(tyro.cli(Args))
