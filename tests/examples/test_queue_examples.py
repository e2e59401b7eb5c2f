"""The examples with a queue run, say what they promise to say, outlive their explorers, and learn."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch
import warm_interpreter
from child_processes import explorers_of
from example_programs import EXAMPLES, assert_tensorboard_says, evaluations, imported, succeed

import torchreplay as tr
from torchreplay.explorers import ExplorerContext

NAMES = ["impala", "ppo"]
SMALL = {"impala": "--num-envs 4 --batch-size 8", "ppo": "--num-envs 4 --length 16 --batch-size 2 --epochs 1"}
QUICK = "--num-explorers 2 --eval-episodes 2 --solved-at 501 --seed 7"

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture
def impala(monkeypatch):
    return imported("impala", monkeypatch)


@pytest.fixture
def ppo(monkeypatch):
    return imported("ppo", monkeypatch)


def assert_learned(lines, steps):
    assert [line["step"] for line in lines] == steps
    assert all(8 <= line["mean_return"] <= 500 and not line["solved"] for line in lines)


@contextmanager
def started(command, directory):
    """A program that runs, with pipes, in a directory."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *command], cwd=directory, **pipes) as program:
        try:
            yield program
        finally:
            program.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_explorer_is_reported_and_started_again_and_the_learner_goes_on(name, tmp_path):
    flags = f"{QUICK} {SMALL[name]} --num-explorers 1 --total-steps 30 --eval-every 10"
    with started([str(EXAMPLES / f"{name}.py"), *flags.split()], tmp_path) as learner:
        first = json.loads(learner.stdout.readline())
        (explorer,) = explorers_of(learner.pid)
        os.kill(explorer, signal.SIGKILL)
        output, errors = learner.communicate(timeout=150)
    assert learner.returncode == 0, errors
    lines = [first, *map(json.loads, output.splitlines())]
    assert_learned(lines, [10, 20, 30])
    assert "explorer 0 of 1 failed (restart 1 in 1 s): its process died of signal 9" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert_tensorboard_says(lines, tmp_path / "runs" / f"{name}-seed7")


WITHOUT_RESTARTS = """
import functools, sys
sys.path.insert(0, {examples!r})
import {name} as example

if __name__ == "__main__":
    example.ExplorerPool = functools.partial(example.ExplorerPool, max_restarts=0)
    example.main(example.tyro.cli(example.Args))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_without_one_explorer_the_others_do_its_work_and_without_any_the_learner_says_what_they_died_of(name, tmp_path):
    (tmp_path / "program.py").write_text(WITHOUT_RESTARTS.format(examples=str(EXAMPLES), name=name))
    flags = f"{QUICK} {SMALL[name]} --total-steps 1000000 --eval-every 10 --no-tensorboard"
    with started(["program.py", *flags.split()], tmp_path) as learner:
        learner.stdout.readline()
        one, other = explorers_of(learner.pid)
        os.kill(one, signal.SIGKILL)
        assert_learned([json.loads(learner.stdout.readline()) for _ in range(3)], [20, 30, 40])
        os.kill(other, signal.SIGKILL)
        _, errors = learner.communicate(timeout=150)
    assert learner.returncode == 1
    said = errors.split("WouldBlockForever: ")[1]
    assert "would wait for ever" in said
    assert said.count("died of signal 9 (Killed)") == 2


ACCOUNTED = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import impala, torch

plain_mlp, plain_loss, plain_replace = impala.mlp, impala.loss_of, os.replace


def die_at(moment):
    if moment == os.environ.get("DIES"):
        os.killpg(0, signal.SIGKILL)  # the learner, the explorers and their fork server


def mlp(inputs, outputs):
    network = plain_mlp(inputs, outputs)
    if outputs == 1:  # the critic, which is saved: how often it has learned from each unroll
        network.register_buffer("learned", torch.zeros(100_000, dtype=torch.int64))
    return network


def loss_of(policy, critic, batch, args):
    critic.learned.index_add_(0, batch["key"], torch.ones_like(batch["key"]))
    die_at(f"learning {{critic.learned.sum() // args.batch_size}}")
    return plain_loss(policy, critic, batch, args)


def replace(source, target):
    plain_replace(source, target)
    die_at(f"saved {{torch.load(target)['step']}}")


impala.mlp, impala.loss_of, os.replace = mlp, loss_of, replace
if __name__ == "__main__":
    impala.main(impala.tyro.cli(impala.Args))
"""


@pytest.mark.slow
def test_impala_killed_as_a_whole_learns_from_each_finished_unroll_once(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(ACCOUNTED.format(examples=str(EXAMPLES)))
    small = f"{QUICK} {SMALL['impala']} --unroll 5 --capacity 400"
    flags = f"{small} --directory run --save-every 4 --total-steps 12 --eval-every 12 --no-tensorboard"

    def live(dies):
        monkeypatch.setenv("DIES", dies)
        return warm_interpreter.run(tmp_path / "program.py", flags.split(), tmp_path, timeout=60)

    for dies, step in (("learning 7", 4), ("saved 8", 8)):  # between two saves; behind the saved model, uncommitted
        assert live(dies).returncode == -signal.SIGKILL
        assert torch.load(tmp_path / "run" / "model.pt")["step"] == step
    done = live("of age")
    assert done.returncode == 0, done.stderr
    assert_learned(evaluations(done), [12])
    learned = torch.load(tmp_path / "run" / "model.pt")["critic"]["learned"]
    assert learned.max() == 1
    assert learned.sum() == 12 * 8
    with tr.ReplayBuffer.open(tmp_path / "run" / "unrolls") as queue:
        stats = queue.stats()
        assert stats.inserted == learned.sum() + stats.drawable  # what was ever finished is learned from, or waits
        assert stats.dropped_items == 0
        assert learned[queue.sample(stats.drawable)["key"]].sum() == 0


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", NAMES)
def test_it_solves_cartpole_within_three_minutes(name, seed, tmp_path):
    last = evaluations(succeed(name, tmp_path, "--seed", str(seed), "--no-tensorboard", timeout=180))[-1]
    assert last["solved"]
    assert last["mean_return"] >= 475


@contextmanager
def exploring(explore, *queues):
    """Runs an explorer's function in a thread, until its block ends."""

    def run():
        with suppress(tr.Stopped):  # as an explorer pool expects it
            explore()

    with ExitStack() as marks:
        for queue in queues:
            marks.enter_context(queue.expect_writers())
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            for queue in queues:
                queue.stop()
            thread.join()


def log_probs_of(policy, obs, action):
    """By torch's own distribution."""
    return torch.distributions.Categorical(logits=policy(obs)).log_prob(action)


def test_an_impala_explorer_stores_the_log_probability_that_its_policy_gave_to_each_action(impala):
    torch.manual_seed(1)
    args = impala.Args(num_envs=3, unroll=5)
    policy = impala.mlp(4, 2).requires_grad_(False)
    spec = tr.spec_from_env(gymnasium.make("CartPole-v1")) | {"log_prob": tr.Field()}
    queue = tr.ReplayBuffer(spec, 500, view=tr.Sequences(args.unroll), sampler=tr.Fifo())
    context = ExplorerContext(queue, tr.SharedWeights(policy), seed=5)
    with exploring(lambda: impala.explore(context, args), queue):
        batch = queue.sample(50)
    mask = batch["mask"]
    expected = log_probs_of(policy, batch["obs"][:, :-1], batch["action"])
    torch.testing.assert_close(batch["log_prob"][mask], expected[mask], atol=1e-6, rtol=1e-5)
    assert not mask.all()  # unrolls that their episode's end cuts short are among them
    assert batch["action"][mask].unique().tolist() == [0, 1]


def unrolls(lengths, steps, terminated):
    """Unrolls of random steps. The last one of an unroll may terminate its episode."""
    size, last = len(lengths), torch.tensor(lengths) - 1
    batch = {"reward": torch.randn(size, steps), "terminated": torch.zeros(size, steps, dtype=torch.bool)}
    batch["mask"] = torch.arange(steps) <= last[:, None]
    batch["terminated"][torch.arange(size), last] = torch.tensor(terminated)
    return batch


def test_v_trace_is_the_sum_of_the_paper(impala):
    # Equation 1: v_s = V(x_s) + sum_t gamma^(t-s) (prod_{i<t} c_i) rho_t (r_t + gamma V(x_t+1) - V(x_t)).
    torch.manual_seed(2)
    args, lengths, terminated = impala.Args(gamma=0.9, ratio_bound=1.3), [6, 6, 4, 3], [False, True, True, False]
    batch = unrolls(lengths, 6, terminated)
    log_ratio, value = torch.randn(4, 6), torch.randn(4, 7)
    goal, advantage = impala.vtrace(log_ratio, value, batch, args)
    for row, length in enumerate(lengths):
        ratio = log_ratio[row].exp().clamp(max=1.3).tolist()
        reward, values = batch["reward"][row].tolist(), value[row].tolist()
        if terminated[row]:
            values[length] = 0.0
        v = []
        for s in range(length):
            total, factor = values[s], 1.0
            for t in range(s, length):
                total += factor * ratio[t] * (reward[t] + 0.9 * values[t + 1] - values[t])
                factor *= 0.9 * ratio[t]
            v.append(total)
        assert goal[row, :length].tolist() == pytest.approx(v, abs=1e-4)
        v.append(values[length])
        expected = [ratio[s] * (reward[s] + 0.9 * v[s + 1] - values[s]) for s in range(length)]
        assert advantage[row, :length].tolist() == pytest.approx(expected, abs=1e-4)


def test_of_one_s_own_policy_v_trace_is_the_return_until_the_unroll_ends(impala):
    batch = unrolls([4], 4, [False])
    value = torch.randn(1, 5)
    goal, _ = impala.vtrace(torch.zeros(1, 4), value, batch, impala.Args(gamma=0.5))
    powers = 0.5 ** torch.arange(4)
    assert goal[0, 0].item() == pytest.approx((batch["reward"][0] @ powers + 0.5**4 * value[0, 4]).item(), abs=1e-5)


def test_what_lies_beyond_an_episode_s_end_changes_nothing_that_impala_learns(impala):
    torch.manual_seed(3)
    policy, critic, args = impala.mlp(4, 2), impala.mlp(4, 1), impala.Args()
    batch = unrolls([5, 2], 5, [False, True])
    batch |= {"obs": torch.randn(2, 6, 4), "action": torch.randint(2, (2, 5)), "log_prob": -torch.rand(2, 5)}
    loss = impala.loss_of(policy, critic, batch, args)
    for name in ("reward", "log_prob"):
        batch[name][1, 2:] = 7.0
    batch["obs"][1, 3:] = 7.0  # the last observation is the one that the second step led to
    torch.testing.assert_close(impala.loss_of(policy, critic, batch, args), loss)


def test_an_environment_without_a_threshold_needs_one(impala):
    with pytest.raises(ValueError, match=r"Pendulum-v1 has no reward threshold: .* --solved-at"):
        impala.main(impala.Args(env="Pendulum-v1", tensorboard=False))


@pytest.fixture
def going_round(ppo):
    """A small run of PPO without its learner: (args, the explorer's context, orders, rollouts, the policy)."""
    torch.manual_seed(4)
    args, policy = ppo.Args(num_envs=3, length=30, batch_size=2), ppo.mlp(2).requires_grad_(False)
    orders = tr.ReplayBuffer({"version": tr.Field((), torch.int64)}, 8, sampler=tr.Fifo())
    rollouts = tr.ReplayBuffer(ppo.spec_of(args), 8, sampler=tr.Fifo())
    return args, ExplorerContext(rollouts, tr.SharedWeights(policy), seed=5), orders, rollouts, policy


def test_every_batch_of_ppo_is_of_the_policy_that_the_learner_has(ppo, going_round):
    args, context, orders, rollouts, policy = going_round
    weights = context.weights
    with exploring(lambda: ppo.explore(context, orders, args), rollouts, orders):
        for _ in range(4):
            batch = ppo.collect(orders, rollouts, weights.version, args)
            expected = log_probs_of(policy, batch["obs"][:, :-1], batch["action"])
            torch.testing.assert_close(batch["log_prob"], expected, atol=1e-6, rtol=1e-5)
            assert batch["version"].tolist() == [weights.version] * 2
            with torch.no_grad():
                policy[-1].weight.add_(torch.randn_like(policy[-1].weight))
            weights.publish(policy)
        assert rollouts.stats().rows_written == 8  # nothing is played that was not ordered


def test_episodes_go_on_from_rollout_to_rollout_and_the_steps_that_reset_are_left_out(ppo, going_round):
    args, context, orders, rollouts, _ = going_round
    with exploring(lambda: ppo.explore(context, orders, args), rollouts, orders):
        batch = ppo.collect(orders, rollouts, 0, args)
    assert torch.equal(batch["obs"][0, -1], batch["obs"][1, 0])
    terminated, mask, obs = batch["terminated"].flatten(0, 1), batch["mask"].flatten(0, 1), batch["obs"][:, 1:]
    assert terminated.sum() >= 3
    assert torch.equal(~mask[1:], terminated[:-1])
    assert batch["reward"].flatten(0, 1)[mask].unique().tolist() == pytest.approx([0.01])
    assert (obs.flatten(0, 1)[~mask].abs() <= 0.05).all()  # CartPole's first observations


def test_ppo_leaves_out_a_rollout_of_another_version_than_the_learner_s(ppo, going_round):
    args, _, orders, rollouts, _ = going_round
    for version, reward in [(3, 1.0), (4, 2.0), (3, 3.0), (4, 4.0), (4, 5.0)]:
        rows = {name: torch.zeros((1, *field.shape), dtype=field.dtype) for name, field in ppo.spec_of(args).items()}
        rows["version"][:], rows["reward"][:] = version, reward
        rollouts.extend(**rows)
    batch = ppo.collect(orders, rollouts, 4, args)
    assert batch["reward"][:, 0, 0].tolist() == [2.0, 4.0]
    assert orders.sample(2)["version"].tolist() == [4, 4]


def test_generalized_advantages_are_the_discounted_sums_of_each_episode_s_own_errors(ppo):
    torch.manual_seed(6)
    args, value = ppo.Args(gamma=0.9, gae_lambda=0.8), torch.randn(1, 9, 1)
    batch = {"reward": torch.randn(1, 8, 1), "terminated": torch.zeros(1, 8, 1, dtype=torch.bool)}
    batch["terminated"][0, 2] = True  # step 3 resets; step 6 ends by a time limit, and 7 resets
    batch["mask"] = torch.tensor([1, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)[None, :, None]
    found = ppo.advantages(value, batch, args).flatten().tolist()
    reward, v = batch["reward"].flatten().tolist(), value.flatten().tolist()
    for first, last in [(0, 2), (4, 6)]:
        v[last + 1] = 0.0 if last == 2 else v[last + 1]
        errors = {t: reward[t] + 0.9 * v[t + 1] - v[t] for t in range(first, last + 1)}
        for s in errors:
            expected = sum((0.9 * 0.8) ** (t - s) * error for t, error in errors.items() if t >= s)
            assert found[s] == pytest.approx(expected, abs=1e-5)
    assert found[3] == found[7] == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"), [(1.3, 1.0, False), (0.7, 1.0, True), (0.7, -1.0, False), (1.3, -1.0, True)]
)
def test_a_ratio_beyond_the_clip_moves_the_policy_only_back(ppo, ratio, advantage, moves):
    torch.manual_seed(7)
    policy, critic, obs, action = ppo.mlp(2), ppo.mlp(1), torch.randn(1, 4), torch.tensor([1])
    log_prob = log_probs_of(policy, obs, action).detach() - torch.tensor(ratio).log()
    steps = {"obs": obs, "action": action, "log_prob": log_prob, "goal": critic(obs).detach().flatten()}
    loss = ppo.loss_of(policy, critic, steps | {"advantage": torch.tensor([advantage])}, ppo.Args(clip=0.2))
    clipped = min(ratio * advantage, max(0.8, min(ratio, 1.2)) * advantage)
    assert loss.item() == pytest.approx(-clipped, abs=1e-5)
    loss.backward()
    assert bool(policy[-1].weight.grad.any()) == moves
