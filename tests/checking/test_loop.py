"""`check(env, buffer, loop=...)` names what is wrong with a loop, and the line; of a right loop it says nothing."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit
from gymnasium.wrappers.vector import RecordEpisodeStatistics as VectorRecordEpisodeStatistics

import torchreplay as tr


class Walk(gymnasium.Env):
    """Observations count up without end; episodes of five steps end by termination and by truncation in turns."""

    observation_space = spaces.Box(0, 1e6, (2,), np.float64)
    action_space = spaces.Discrete(1000)

    def __init__(self):
        self.count, self.episode = 0, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        over, good = self.t == 5, self.episode % 2 == 0
        return self._obs(), 1.0 + 0.1 * self.t, over and good, over and not good, {}

    def _obs(self):
        self.count += 1
        return np.array([self.count, 1e6 - self.count])


def rows_buffer(**options):
    spec = tr.spec_from_env(Walk(), next_obs=True)
    return tr.ReplayBuffer(spec, 1000, **options)


def linked_buffer(**options):
    return tr.ReplayBuffer(tr.spec_from_env(Walk()), 1000, view=tr.Transitions(), **options)


def findings(loop, buffer, env=None, **options):
    with buffer:
        return tr.check(env or Walk(), buffer, episodes=6, loop=loop, **options).findings


def only(found, text, line):
    """The one finding, which says `text` and names the line of the loop that has `line`."""
    assert len(found) == 1, found
    assert text in found[0].what
    file, number = found[0].where.rsplit(":", 1)
    assert file == __file__
    assert line in Path(file).read_text().splitlines()[int(number) - 1]


def right_rows(env, buffer):
    with buffer.writer() as writer:
        while True:
            obs, _ = env.reset()
            over = False
            while not over:
                action = env.action_space.sample()
                next_obs, reward, terminated, truncated, _ = env.step(action)
                ends = {"terminated": terminated, "truncated": truncated}
                writer.append(obs=obs, action=action, reward=reward, next_obs=next_obs, **ends)
                obs, over = next_obs, terminated or truncated


def right_steps(env, buffer):
    with buffer.writer() as writer:
        while True:
            obs, _ = env.reset()
            writer.reset(obs=obs)
            over = False
            while not over:
                action = env.action_space.sample()
                obs, reward, terminated, truncated, _ = env.step(action)
                writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
                over = terminated or truncated


def right_episodes(env, buffer):
    while True:
        obs, _ = env.reset()
        steps, observed, over = [], [obs], False
        while not over:
            action = env.action_space.sample()
            obs, reward, terminated, truncated, _ = env.step(action)
            observed.append(obs)
            steps.append((action, reward, terminated, truncated))
            over = terminated or truncated
        names = ("action", "reward", "terminated", "truncated")
        columns = {name: np.array(column) for name, column in zip(names, zip(*steps, strict=True), strict=True)}
        buffer.extend(obs=np.stack(observed), **columns)


@pytest.mark.parametrize(
    ("loop", "make"), [(right_rows, rows_buffer), (right_steps, linked_buffer), (right_episodes, linked_buffer)]
)
def test_nothing_is_said_of_a_loop_that_is_right(loop, make):
    assert findings(loop, make()) == ()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_nothing_is_said_of_a_right_loop_over_a_vector_environment(mode):
    def loop(env, buffer):
        with buffer.writer(num_envs=3, autoreset=mode) as writer:
            obs, _ = env.reset()
            writer.reset(obs=obs)
            while True:
                action = env.action_space.sample()
                obs, reward, terminated, truncated, infos = env.step(action)
                last = {"final_obs": infos.get("final_obs")} if mode == AutoresetMode.SAME_STEP else {}
                ends = {"terminated": terminated, "truncated": truncated}
                writer.step(obs=obs, action=action, reward=reward, **ends, **last)

    assert findings(loop, linked_buffer(), SyncVectorEnv([Walk] * 3, autoreset_mode=mode)) == ()


def test_a_loop_may_wrap_the_environment():
    def loop(env, buffer):
        right_rows(TimeLimit(RecordEpisodeStatistics(env), 100), buffer)

    assert findings(loop, rows_buffer()) == ()


@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP])
def test_a_loop_sees_what_the_environment_has(mode):
    own = Walk() if mode is None else SyncVectorEnv([Walk] * 3, autoreset_mode=mode)
    own.level, seen = 7, []

    def loop(env, buffer):
        seen.append((env.level, env.unwrapped, env.metadata, env.action_space, env.spec))

    findings(loop, rows_buffer(), own)
    assert seen == [(7, own, own.metadata, own.action_space, own.spec)]


def test_an_environment_that_only_looks_like_one_of_gymnasium_will_do():
    class Alike:
        observation_space, action_space, metadata = Walk.observation_space, Walk.action_space, {}

        def __init__(self):
            self.walk = Walk()
            self.reset, self.step = self.walk.reset, self.walk.step

    assert findings(right_rows, rows_buffer(), Alike()) == ()


def test_a_loop_may_wrap_the_vector_environment():
    def loop(env, buffer):
        env = VectorRecordEpisodeStatistics(env)
        with buffer.writer(num_envs=3) as writer:
            writer.reset(obs=env.reset()[0])
            while True:
                action = env.action_space.sample()
                obs, reward, terminated, truncated, _ = env.step(action)
                writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)

    assert findings(loop, linked_buffer(), SyncVectorEnv([Walk] * 3)) == ()


# Ends


def test_a_time_limit_taken_for_an_end_is_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            obs, _ = env.reset()
            while True:
                action = env.action_space.sample()
                next_obs, reward, terminated, truncated, _ = env.step(action)
                done = terminated or truncated
                row = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs}
                writer.append(**row, terminated=done, truncated=truncated)
                obs = env.reset()[0] if done else next_obs

    only(findings(loop, rows_buffer()), "'terminated' is True where a time limit cut", "terminated=done")


def test_the_same_in_steps_is_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            writer.reset(obs=env.reset()[0])
            while True:
                action = env.action_space.sample()
                obs, reward, terminated, truncated, _ = env.step(action)
                done = terminated or truncated
                writer.step(obs=obs, action=action, reward=reward, terminated=done, truncated=False)
                if done:
                    writer.reset(obs=env.reset()[0])

    found = findings(loop, linked_buffer())
    assert ["'terminated' is True" in finding.what for finding in found].count(True) == 1


def test_an_end_that_is_bootstrapped_through_is_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            obs, _ = env.reset()
            while True:
                action = env.action_space.sample()
                next_obs, reward, terminated, truncated, _ = env.step(action)
                row = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs}
                writer.append(**row, terminated=False, truncated=False)
                obs = env.reset()[0] if terminated or truncated else next_obs

    only(findings(loop, rows_buffer()), "False where the episode ended for good", "terminated=False")


def test_a_time_limit_that_is_not_written_is_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            writer.reset(obs=env.reset()[0])
            while True:
                action = env.action_space.sample()
                obs, reward, terminated, truncated, _ = env.step(action)
                writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=False)
                if terminated or truncated:
                    writer.reset(obs=env.reset()[0])

    only(findings(loop, linked_buffer()), "'truncated' is False where a time limit", "truncated=False")


def test_the_next_episodes_first_observation_in_the_place_of_the_last_is_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            obs, _ = env.reset()
            while True:
                action = env.action_space.sample()
                next_obs, reward, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    next_obs, _ = env.reset()
                ends = {"terminated": terminated, "truncated": truncated}
                writer.append(obs=obs, action=action, reward=reward, next_obs=next_obs, **ends)
                obs = next_obs

    only(findings(loop, rows_buffer()), "first observation of the next episode", "writer.append(obs=obs")


def write_each_vector_step(env, buffer):
    """A loop that takes no notice of what the environments do where an episode ends."""
    obs, _ = env.reset()
    while True:
        action = env.action_space.sample()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        ends = {"terminated": terminated, "truncated": truncated}
        buffer.extend(obs=obs, action=action, reward=reward, next_obs=next_obs, **ends)
        obs = next_obs


def test_the_same_of_a_same_step_autoreset_is_named():
    env = SyncVectorEnv([Walk] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    only(
        findings(write_each_vector_step, rows_buffer(), env),
        "first observation of the next episode",
        "buffer.extend(obs=obs",
    )


def test_the_step_of_a_next_step_autoreset_in_rows_is_named():
    env = SyncVectorEnv([Walk] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    only(
        findings(write_each_vector_step, rows_buffer(), env),
        "a next-step autoreset ignores the action",
        "buffer.extend(obs=obs",
    )


# Observations and steps


def test_an_observation_stored_twice_is_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            obs, _ = env.reset()
            while True:
                action = env.action_space.sample()
                obs, reward, terminated, truncated, _ = env.step(action)
                ends = {"terminated": terminated, "truncated": truncated}
                writer.append(obs=obs, action=action, reward=reward, next_obs=obs, **ends)
                if terminated or truncated:
                    obs, _ = env.reset()

    only(findings(loop, rows_buffer()), "stored twice, as the one before it", "next_obs=obs")


def test_the_observation_before_the_step_in_the_place_of_the_one_after_is_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            obs, _ = env.reset()
            writer.reset(obs=obs)
            while True:
                action = env.action_space.sample()
                next_obs, reward, terminated, truncated, _ = env.step(action)
                writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
                obs = next_obs
                if terminated or truncated:
                    obs, _ = env.reset()
                    writer.reset(obs=obs)

    only(findings(loop, linked_buffer()), "stored again in the place", "writer.step(obs=obs")


def test_a_step_written_twice_and_one_left_out_are_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            for count in range(1000):
                obs, _ = env.reset()
                for _ in range(5):
                    action = env.action_space.sample()
                    next_obs, reward, terminated, truncated, _ = env.step(action)
                    row = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs}
                    for _ in range((1, 2, 0)[count % 3]):
                        writer.append(**row, terminated=terminated, truncated=truncated)
                    obs = next_obs

    found = findings(loop, rows_buffer())
    assert sorted(finding.what.split(":")[0] for finding in found) == [
        "a step is written twice",
        "steps of the environment are not written, the first is step 10 of the loop",
    ]
    assert {finding.rows for finding in found} == {10, 5}


def test_the_action_of_the_step_before_is_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            action = 0
            while True:
                obs, _ = env.reset()
                over = False
                while not over:
                    before, action = action, env.action_space.sample()
                    next_obs, reward, terminated, truncated, _ = env.step(action)
                    ends = {"terminated": terminated, "truncated": truncated}
                    writer.append(obs=obs, action=before, reward=reward, next_obs=next_obs, **ends)
                    obs, over = next_obs, terminated or truncated

    only(findings(loop, rows_buffer()), "the action is that of the step before", "action=before")


@pytest.mark.parametrize("wrapped", [lambda env: env, RecordEpisodeStatistics])
def test_a_loop_that_writes_elsewhere_is_named(wrapped):
    def loop(env, buffer):
        env = wrapped(env)
        env.reset()
        while True:
            *_, terminated, truncated, _ = env.step(0)
            if terminated or truncated:
                env.reset()

    only(findings(loop, rows_buffer()), "nothing was written", "env.step(0)")


# Rewards and priorities


def loop_with(change=lambda reward, t: reward, feed=None, priority=None):
    def loop(env, buffer):
        t = 0
        with buffer.writer() as writer:
            while True:
                obs, _ = env.reset()
                over = False
                while not over:
                    t += 1
                    action = env.action_space.sample()
                    next_obs, reward, terminated, truncated, _ = env.step(action)
                    row = {"obs": obs, "action": action, "reward": change(reward, t), "next_obs": next_obs}
                    writer.append(**row, terminated=terminated, truncated=truncated, priority=priority)
                    obs, over = next_obs, terminated or truncated
                    if feed is not None:
                        batch = buffer.sample(4)
                        feed(buffer, batch)

    return loop


def test_rewards_of_another_scale_than_the_buffer_holds_are_named():
    buffer = rows_buffer()
    n = 40
    buffer.extend(
        obs=np.zeros((n, 2)), next_obs=np.zeros((n, 2)), action=np.zeros(n, int), reward=np.full(n, 100.0),
        terminated=np.zeros(n, bool), truncated=np.zeros(n, bool),
    )  # fmt: skip
    only(
        findings(loop_with(), buffer), "another scale than those that the buffer holds: 1.3 beside 100", "writer.append"
    )


def test_rewards_whose_scale_changes_on_the_way_are_named():
    loop = loop_with(lambda reward, t: reward if t < 15 else reward / 50)
    only(findings(loop, rows_buffer()), "rewards change their scale on the way", "writer.append")


def test_rewards_that_are_scaled_throughout_are_the_users_own_business():
    assert findings(loop_with(lambda reward, t: reward / 50), rows_buffer()) == ()


def test_a_priority_that_never_changes_is_named():
    def feed(buffer, batch):
        buffer.update_priorities(batch, np.ones(4))

    only(findings(loop_with(feed=feed), rows_buffer(sampler=tr.Prioritized())), "fed back is 1:", "update_priorities")


def test_a_priority_that_rows_are_written_with_and_never_changes_is_named():
    found = findings(loop_with(priority=2.5), rows_buffer(sampler=tr.Prioritized()))
    only(found, "every priority that rows are written with is 2.5", "priority=priority")


def test_draws_without_feedback_are_named_under_a_prioritized_sampler_alone():
    def feed(buffer, batch):
        pass

    only(findings(loop_with(feed=feed), rows_buffer(sampler=tr.Prioritized())), "no TD error is fed back", "sample(4)")
    assert findings(loop_with(feed=feed), rows_buffer()) == ()


def test_errors_that_differ_are_no_finding():
    rng = np.random.default_rng(0)

    def feed(buffer, batch):
        buffer.update_priorities(batch, rng.random(4))

    assert findings(loop_with(feed=feed), rows_buffer(sampler=tr.Prioritized())) == ()


# The report, and the buffer


def test_the_report_is_text_with_a_line_a_finding():
    with rows_buffer(sampler=tr.Prioritized()) as buffer:
        text = str(tr.check(Walk(), buffer, loop=loop_with(priority=1.0)))
    first, second = text.splitlines()
    assert "items came back as they were written" in first
    assert second.startswith(f"{__file__}:")


def test_an_error_of_the_loop_is_the_users_and_the_buffer_stays_as_it_is():
    def loop(env, buffer):
        raise KeyError("mine")

    with rows_buffer() as buffer:
        with pytest.raises(KeyError, match="mine"):
            tr.check(Walk(), buffer, loop=loop)
        tr.check(Walk(), buffer, loop=right_rows)
        assert len(buffer) == 0


def test_a_loop_that_ends_by_itself_is_fine():
    def loop(env, buffer):
        with buffer.writer() as writer:
            obs, _ = env.reset()
            next_obs, reward, terminated, truncated, _ = env.step(1)
            ends = {"terminated": terminated, "truncated": truncated}
            writer.append(obs=obs, action=1, reward=reward, next_obs=next_obs, **ends)

    assert findings(loop, rows_buffer()) == ()
