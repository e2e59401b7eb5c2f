"""What `Hindsight` makes of its functions: when they are called, what they may do and return, who must have them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import torchreplay as tr

STEPS, GOAL = 6, 99.0
ENDS = {"terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}


def closeness(achieved, desired):
    return -(achieved - desired).abs()[:, 0]


def reached(achieved, desired):
    return (achieved == desired)[:, 0]


def view_of(compute_reward=closeness, compute_terminated=None, share=1.0):
    """With the last step's place for a goal."""
    names = {"achieved": "at", "desired": "goal", "observation": ("at", "goal")}
    return tr.Hindsight(compute_reward, strategy="final", share=share, compute_terminated=compute_terminated, **names)


def buffer_of(*functions, share=1.0, reward=(), path=None):
    """An episode at the places 0, 1, ..., which never reaches its goal; the reward for coming to place n is n."""
    spec = {"at": tr.Field((1,)), "goal": tr.Field((1,)), "reward": tr.Field(reward), **ENDS}
    buffer = tr.ReplayBuffer(spec, 50, view=view_of(*functions, share=share), path=path, seed=1)
    last = np.arange(STEPS) == STEPS - 1
    buffer.extend(
        at=np.arange(STEPS + 1.0)[:, None],
        goal=np.full((STEPS + 1, 1), GOAL),
        reward=np.broadcast_to(np.arange(1.0, STEPS + 1).reshape(-1, *[1] * len(reward)), (STEPS, *reward)),
        terminated=last & False,
        truncated=last,
    )
    return buffer


# Whom they are called for, and how


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("n", [3, 64])
def test_a_relabelled_item_has_the_whole_reward_of_its_new_goal_and_any_other_its_own(shape, n):
    parts = torch.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape)

    def compute_reward(achieved, desired):
        return closeness(achieved, desired).reshape(-1, *[1] * len(shape)) * parts

    buffer = buffer_of(compute_reward, share=0.5, reward=shape)
    for _ in range(8):
        batch = buffer.sample(n)
        assert batch["reward"].shape == (n, *shape)
        for i, relabelled in enumerate(batch["relabelled"].tolist()):
            place = float(batch["next_at"][i])
            due = (place - STEPS) * parts if relabelled else torch.full(shape, place)
            assert torch.equal(batch["reward"][i], due)
    assert 0 < batch["relabelled"].sum() < n or n == 3


def test_a_batch_has_no_graph_of_what_computes_its_rewards():
    net = torch.nn.Linear(1, 1)

    def compute_reward(achieved, desired):
        assert not torch.is_grad_enabled()
        return net(achieved - desired)[:, 0]

    def with_gradients_of_its_own(achieved, desired):
        with torch.enable_grad():
            return net(achieved - desired)[:, 0]

    for function in (compute_reward, with_gradients_of_its_own):
        assert not buffer_of(function).sample(8)["reward"].requires_grad


def test_a_function_that_works_in_place_changes_nothing_but_its_copies():
    def compute_reward(achieved, desired):
        achieved -= desired
        desired.zero_()
        return -achieved.abs_()[:, 0]

    batch = buffer_of(compute_reward, reached).sample(64)
    assert set(batch["next_at"][:, 0].tolist()) == set(range(1, STEPS + 1))
    assert batch["goal"].eq(STEPS).all()
    assert batch["next_goal"].eq(STEPS).all()
    assert torch.equal(batch["reward"], batch["next_at"][:, 0] - STEPS)
    assert torch.equal(batch["terminated"], batch["next_at"][:, 0] == STEPS)
    assert torch.equal(batch["discount"], torch.where(batch["terminated"], 0.0, 0.99))


def test_functions_are_not_called_where_nothing_is_relabelled():
    def fails(achieved, desired):
        raise AssertionError

    for functions, share in (((fails, fails), 0.0), ((None,), 0.0)):
        batch = buffer_of(*functions, share=share).sample(32)
        assert not batch["relabelled"].any()
        assert torch.equal(batch["reward"], batch["next_at"][:, 0])
        assert batch["goal"].eq(GOAL).all()
    buffer = buffer_of(fails, fails)
    for keys, n in ((torch.arange(STEPS), STEPS), (torch.tensor([STEPS]), 0)):  # the last row starts no item
        batch = buffer.gather(keys)
        assert batch["goal"].shape == (n, 1)
        assert batch["goal"].eq(GOAL).all()


def test_items_gathered_or_drawn_in_reverse_come_as_they_were_lived():
    buffer = buffer_of(closeness, reached)
    assert buffer.sample(8)["relabelled"].all()
    for batch in (buffer.gather(torch.arange(STEPS)), tr.Reverse(buffer, 2).sample(8)):
        assert not batch["relabelled"].any()
        assert torch.equal(batch["reward"], batch["next_at"][:, 0])
        assert batch["goal"].eq(GOAL).all()


def test_a_priority_is_that_of_the_step_it_is_given_with():
    spec = {"at": tr.Field((1,)), "goal": tr.Field((1,)), "reward": tr.Field(), **ENDS}
    buffer = tr.ReplayBuffer(spec, 50, view=view_of(), sampler=tr.Prioritized(alpha=1.0))
    place = np.zeros(1)
    with buffer.writer() as writer:
        writer.reset(at=place, goal=place)
        for t in range(1, 5):
            writer.step(at=place, goal=place, reward=0.0, terminated=False, truncated=t == 4, priority=t)
    assert buffer.gather(torch.arange(5))["probability"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=1e-4)


# What they return


@pytest.mark.parametrize(
    "made",
    [torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.double, torch.Tensor.int, torch.Tensor.requires_grad_],
    ids=lambda made: made.__name__,
)
def test_rewards_may_be_anything_that_makes_a_tensor_of_real_numbers(made):
    batch = buffer_of(lambda *goals: made(closeness(*goals))).sample(8)
    assert batch["reward"].dtype == torch.float32
    assert torch.equal(batch["reward"], batch["next_at"][:, 0] - STEPS)


@pytest.mark.parametrize("made", [torch.Tensor.numpy, torch.Tensor.tolist], ids=lambda made: made.__name__)
def test_flags_may_be_anything_that_makes_a_tensor_of_bools(made):
    batch = buffer_of(closeness, lambda *goals: made(reached(*goals))).sample(8)
    assert torch.equal(batch["terminated"], batch["next_at"][:, 0] == STEPS)


BAD = {
    "nothing": (lambda x: None, "got None, expected"),
    "a text": (lambda x: "great", "got 'great', expected"),
    "a tuple": (lambda x: (x, {}), r"got \(tensor.*, expected"),
    "a tensor without values": (lambda x: x.to("meta"), "got tensor.*meta.*, expected"),
}


@pytest.mark.parametrize(("made", "message"), BAD.values(), ids=BAD)
def test_what_makes_no_tensor_is_a_value_error_that_names_the_function(made, message):
    for functions, name, kind in (
        ((lambda *goals: made(closeness(*goals)),), "compute_reward", "real numbers"),
        ((closeness, lambda *goals: made(reached(*goals))), "compute_terminated", "bools"),
    ):
        with pytest.raises(ValueError, match=f"what {name} returned: {message} {kind}, one for each item"):
            buffer_of(*functions).sample(8)


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (lambda x: x[:, None], r"torch.float32 \[8, 1\]"),
        (lambda x: x.mean(), r"torch.float32 \[\]"),
        (lambda x: x[1:], r"torch.float32 \[7\]"),
        (lambda x: x.to(torch.complex64), r"torch.complex64 \[8\]"),
    ],
    ids=["a column", "a mean", "too few", "complex"],
)
def test_rewards_of_another_shape_or_kind_are_refused(made, given):
    with pytest.raises(ValueError, match=rf"compute_reward returned {given}: expected real numbers \[8\]"):
        buffer_of(lambda *goals: made(closeness(*goals))).sample(8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_flags_that_are_no_bools_are_refused(dtype):
    with pytest.raises(ValueError, match=rf"compute_terminated returned {dtype} \[8\]: expected bools \[8\]"):
        buffer_of(closeness, lambda *goals: reached(*goals).to(dtype)).sample(8)


@pytest.mark.gpu
def test_what_was_computed_on_a_gpu_comes_to_the_batch():
    batch = buffer_of(lambda *goals: closeness(*goals).cuda(), lambda *goals: reached(*goals).cuda()).sample(8)
    assert batch["reward"].device.type == batch["terminated"].device.type == "cpu"
    assert torch.equal(batch["reward"], batch["next_at"][:, 0] - STEPS)


# Who must have them


@pytest.fixture(params=["attach", "load", "open"])
def again(request, tmp_path):
    """Has a buffer with the functions given made, and then found again with a view given."""
    made = []

    def make(*functions):
        buffer = buffer_of(*functions, path=tmp_path / "buffer.bin")
        if request.param == "load":
            buffer.save(tmp_path / "checkpoint")
        if request.param == "open":
            buffer.close()
        made.append(buffer)

    def find(view=None):
        if request.param == "attach":
            return tr.ReplayBuffer.attach(made[0].handle(), view)
        if request.param == "load":
            return tr.ReplayBuffer.load(tmp_path / "checkpoint", view=view)
        return tr.ReplayBuffer.open(tmp_path / "buffer.bin", view=view)

    return make, find


def test_a_view_that_lacks_the_buffers_compute_terminated_is_refused(again):
    make, find = again
    make(closeness, reached)
    for terminated in (None, find().view.compute_terminated):
        with pytest.raises(ValueError, match=r"has no compute_terminated, and the buffer was made with one: .*give"):
            find(view_of(closeness, terminated))
    assert find(view_of(closeness, reached)).sample(64)["terminated"].any()


def test_a_view_with_a_compute_terminated_that_the_buffer_lacks_is_refused(again):
    make, find = again
    make(closeness)
    with pytest.raises(ValueError, match=r"has a compute_terminated, and the buffer was made without one: .*leave"):
        find(view_of(closeness, reached))
    assert not find(view_of(closeness)).sample(64)["terminated"].any()


@pytest.mark.parametrize("given", [True, False], ids=["with it", "without"])
def test_where_the_buffer_was_made_without_functions_any_may_be_given(again, given):
    make, find = again
    make(None)
    assert find(view_of(closeness, reached if given else None)).sample(64)["terminated"].any() == given


@pytest.mark.parametrize("given", [True, False], ids=["with it", "without"])
def test_where_a_description_of_old_does_not_say_which_functions_there_were_any_may_be_given(again, given, monkeypatch):
    make, find = again
    with monkeypatch.context() as patch:
        patch.setattr(tr.Hindsight, "as_data", lambda self: replace(self, compute_reward=None, compute_terminated=None))
        make(closeness, reached)
    assert find().view == view_of(None)
    assert find(view_of(closeness, reached if given else None)).sample(64)["terminated"].any() == given


def test_a_process_without_the_functions_says_so_at_a_draw_and_hands_on_which_there_are(again, tmp_path):
    make, find = again
    make(closeness, reached)
    for found in (find(), find(view_of(None)), find(find().view)):
        assert not found.gather(torch.arange(STEPS))["relabelled"].any()
        with pytest.raises(RuntimeError, match=r"lacks the view's functions.*view=Hindsight\(compute_reward"):
            found.sample(8)
        found.save(tmp_path / "again")
        with pytest.raises(ValueError, match="view has no compute_terminated"):
            tr.ReplayBuffer.load(tmp_path / "again", view=view_of(closeness))
        tr.ReplayBuffer.load(tmp_path / "again").save(tmp_path / "twice")
        with pytest.raises(ValueError, match="view has no compute_terminated"):
            tr.ReplayBuffer.load(tmp_path / "twice", view=view_of(closeness))


def test_a_buffer_made_with_the_view_of_a_process_without_the_functions_says_so_at_a_draw():
    buffer = buffer_of(closeness, reached)
    terminated = tr.ReplayBuffer.attach(buffer.handle()).view.compute_terminated
    for function in (None, closeness):
        with pytest.raises(RuntimeError, match="lacks the view's functions"):
            buffer_of(function, terminated).sample(8)
