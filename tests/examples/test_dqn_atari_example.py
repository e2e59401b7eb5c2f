"""The Atari example runs on real games, writes what was played, and says what a transition costs."""

import gc
from collections import Counter

import numpy as np
import pytest
import torch
from example_programs import evaluations, imported, parsed, refusal, succeed

import torchreplay as tr
from torchreplay.ray import ExplorerContext

NAME = "dqn_atari"
QUICK = "--total-steps 40 --eval-every 20 --eval-episodes 2 --max-frames 240 --num-envs 2 --learning-starts 200"
PONG = ("--game", "pong")
TINY = "--channels 2 --batch-size 8 --no-tensorboard --plot new/run.png"

pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")
pytest.importorskip("ale_py")


@pytest.fixture(autouse=True)
def games_end_with_their_test():
    """Those that are garbage have threads. A child that a later test forks would wait for them, or crash."""
    yield
    gc.collect()


@pytest.fixture
def example(monkeypatch):
    return imported(NAME, monkeypatch)


@pytest.mark.slow
def test_a_short_run_shows_its_throughput_and_at_most_1900_bytes_a_row_and_draws_a_picture(tmp_path):
    lines = evaluations(succeed(NAME, tmp_path, *PONG, *QUICK.split(), *TINY.split(), timeout=170))
    assert [line["step"] for line in lines] == [20, 40]
    assert all(-21 <= line["mean_return"] <= 21 and line["samples_per_insert"] > 0 for line in lines)
    assert all(42 * 42 < line["bytes_per_row"] <= 1_900 for line in lines)
    for line in lines:
        assert line["steps_per_second"] == pytest.approx(line["step"] / line["seconds"], rel=0.1)
        assert line["rows_per_second"] == pytest.approx(line["rows"] / line["seconds"], rel=0.1)
    assert [path.name for path in tmp_path.glob("**/*.*")] == ["run.png"]


@pytest.mark.soak
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("seed", range(5))
def test_it_plays_road_runner_as_well_as_a_human_tester(seed, tmp_path):
    done = succeed(NAME, tmp_path, "--seed", str(seed), "--no-tensorboard", timeout=1900)
    last = evaluations(done)[-1]
    assert last["solved"]
    assert last["mean_return"] >= 7_845  # Mnih et al. (2015), extended data table 2


def recording(environment):
    """Returns a class of vector environments that record their calls and their results."""

    class Recording(environment):
        last = None  # the one that was reset last

        def reset(self, **arguments):
            Recording.last = self
            frames, info = super().reset(**arguments)
            self.first, self.steps = (frames.copy(), info["lives"].copy()), []
            return frames, info

        def step(self, actions):
            frames, rewards, terminated, truncated, info = super().step(actions)
            ends = frames.copy()
            for lane in np.flatnonzero(terminated | truncated):
                ends[lane] = info["final_obs"][lane]
            self.steps.append(
                (actions.copy(), frames.copy(), ends, rewards.copy(), terminated, truncated, info["lives"].copy())
            )
            return frames, rewards, terminated, truncated, info

    return Recording


def episodes_of(played, lane):
    """Yields (frames, actions, rewards, terminated, truncated) of one lane's episodes, the unfinished one too."""
    frames, actions, rewards, lives = [played.first[0][lane, 0]], [], [], played.first[1][lane]
    for action, following, ends, reward, terminated, truncated, lives_left in played.steps:
        over = terminated[lane] or truncated[lane]
        lost_a_life = not over and lives_left[lane] < lives
        actions, rewards = [*actions, action[lane]], [*rewards, float(np.clip(reward[lane], -1, 1))]
        frames, lives = [*frames, ends[lane, 0]], lives_left[lane]
        if over or lost_a_life:
            yield frames, actions, rewards, terminated[lane] or lost_a_life, truncated[lane]
            frames, actions, rewards = [following[lane, 0]], [], []
    yield frames, actions, rewards, False, False


def transitions_of(frames, actions, rewards, terminated, truncated, n, gamma):
    """Yields an episode's n-step transitions with stacks of four frames, by their definition."""
    steps = len(actions)

    def stack(t):
        return np.stack([frames[max(t - back, 0)] for back in (3, 2, 1, 0)]).tobytes()

    for t in range(steps):
        m = min(n, steps - t)
        if m < n and not (terminated or truncated):
            return
        reward = sum(gamma**k * rewards[t + k] for k in range(m))
        discount = 0.0 if terminated and t + m == steps else gamma**m
        yield stack(t), actions[t], np.float32(reward), np.float32(discount), stack(t + m)


class StopsAfter(ExplorerContext):
    """The context of an explorer that takes a number of steps, without a pool."""

    def __init__(self, buffer, weights, steps):
        super().__init__(buffer, weights, seed=7)
        self.steps, self.games = steps, []

    @property
    def stopped(self):
        self.steps -= 1
        return self.steps < 0

    def record(self, *, episode_return, episode_length):
        self.games += zip(episode_return, episode_length, strict=True)


@pytest.fixture
def played(example, monkeypatch):
    """What an explorer wrote, and what it played: 300 steps of Breakout in two lanes, in which games and lives end."""
    args = example.Args(game="breakout", num_envs=2, max_frames=360, capacity=1_000, channels=2)
    torch.manual_seed(0)
    network = example.DuelingNetwork(4, args.channels)
    view = tr.Transitions(args.n_step, args.gamma, stack={"obs": 4})
    buffer = tr.ReplayBuffer(example.SPEC, args.capacity, view=view, sampler=tr.Prioritized())
    environment = recording(example.AtariVectorEnv)
    monkeypatch.setattr(example, "AtariVectorEnv", environment)
    context = StopsAfter(buffer, tr.SharedWeights(network), steps=300)
    with torch.no_grad():
        example.explore(context, args)
    return args, buffer, environment.last, context


def test_an_explorer_writes_exactly_the_transitions_that_were_played(played):
    args, buffer, games, _ = played
    batch = buffer.gather(torch.arange(buffer.stats().rows_written))
    written = Counter(
        (obs.numpy().tobytes(), action.item(), np.float32(reward), np.float32(discount), following.numpy().tobytes())
        for obs, action, reward, discount, following in zip(
            batch["obs"], batch["action"], batch["reward"], batch["discount"], batch["next_obs"], strict=True
        )
    )
    episodes = [episode for lane in range(2) for episode in episodes_of(games, lane)]
    assert any(terminated for *_, terminated, _ in episodes)
    assert any(truncated for *_, truncated in episodes)
    expected = Counter(item for episode in episodes for item in transitions_of(*episode, args.n_step, args.gamma))
    assert written == expected


def test_a_lost_life_ends_an_episode_but_neither_the_game_nor_its_return(played):
    _, _, games, context = played
    rewards, lengths, ended = np.zeros(2), np.zeros(2, int), []
    for _, _, _, reward, terminated, truncated, _ in games.steps:
        rewards, lengths = rewards + reward, lengths + 1
        for lane in np.flatnonzero(terminated | truncated):
            ended.append((rewards[lane], lengths[lane]))
            rewards[lane] = lengths[lane] = 0
    assert context.games == ended
    assert len(list(episodes_of(games, 0))) + len(list(episodes_of(games, 1))) > len(ended) + 2


def test_the_values_of_a_dueling_network_have_the_value_of_the_state_as_their_mean(example):
    network = example.DuelingNetwork(6, channels=2)
    frames = torch.randint(0, 256, (5, 4, 42, 42), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    value = network.value(network.features(frames / 255)).squeeze(-1)
    torch.testing.assert_close(network(frames).mean(-1), value)


def test_only_the_chosen_actions_of_the_game_are_played(example, monkeypatch):
    environment = recording(example.AtariVectorEnv)
    monkeypatch.setattr(example, "AtariVectorEnv", environment)
    args = example.Args(game="pong", actions=(0, 2, 3), max_frames=160, eval_episodes=2)
    example.evaluate(example.DuelingNetwork(3, 2), args, seed=1)
    assert {action for actions, *_ in environment.last.steps for action in actions.tolist()} <= {0, 2, 3}


def test_a_game_that_there_is_not_is_refused_by_name(monkeypatch, capsys):
    said = refusal(NAME, monkeypatch, capsys, "--game", "MsPacman")
    assert "unknown game 'MsPacman': expected the name of a ROM in ale-py, such as ms_pacman" in said


@pytest.mark.parametrize(("actions", "unknown"), [("0 6", "[6]"), ("7 2 6", "[7, 6]")])
def test_actions_that_the_game_does_not_have_are_refused_by_number(actions, unknown, monkeypatch, capsys):
    said = refusal(NAME, monkeypatch, capsys, *PONG, "--actions", *actions.split())
    assert f"unknown actions {unknown}: pong has 0 to 5" in said


def test_without_a_choice_all_of_the_game_s_actions_are_played(monkeypatch):
    assert parsed(NAME, monkeypatch, *PONG, "--actions", "0", "2", "5").actions == (0, 2, 5)
    assert parsed(NAME, monkeypatch, *PONG).actions == (0, 1, 2, 3, 4, 5)


def test_an_evaluated_game_of_pong_against_an_idle_paddle_is_lost_by_21(example):
    class Idle(torch.nn.Module):
        def forward(self, obs):
            return torch.tensor([1.0, 0.0, 0.0]).expand(len(obs), 3)

    returns = example.evaluate(Idle(), example.Args(game="pong", actions=(0, 2, 3), eval_episodes=2), seed=1)
    assert returns.tolist() == [-21, -21]
