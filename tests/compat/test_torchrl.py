"""`compat.torchrl`: what TorchRL's losses and programs do with a buffer, beside TorchRL's own."""

import json
import math
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from paths import ROOT
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import torchreplay as tr
from torchreplay.compat.torchrl import TensorDictReplayBuffer


def transitions(n, seed=0, batch_size=None):
    g = torch.Generator().manual_seed(seed)
    td = TensorDict(
        {
            "observation": torch.randn(n, 4, generator=g),
            "action": nn.functional.one_hot(torch.randint(0, 2, (n,), generator=g), 2),
            "next": {
                "observation": torch.randn(n, 4, generator=g),
                "reward": torch.randn(n, 1, generator=g),
                "done": torch.zeros(n, 1, dtype=torch.bool),
                "terminated": torch.zeros(n, 1, dtype=torch.bool),
            },
        },
        [n],
    )
    return td if batch_size is None else td.reshape(batch_size)


@pytest.fixture
def rb():
    rb = TensorDictReplayBuffer(100, batch_size=16, sampler=tr.Prioritized(1.0, 0.4), seed=0)
    yield rb
    if len(rb):
        rb.buffer.close()


def test_rows_come_back_as_they_were(rb):
    td = transitions(30)
    index = rb.extend(td)
    assert index.tolist() == list(range(30))
    batch = rb.sample()
    assert batch.batch_size == torch.Size([16])
    assert (batch.exclude("index", "priority_weight") == td[batch["index"]]).all()


def test_a_sample_has_the_entries_of_torchrls_own(rb):
    from torchrl.data import LazyTensorStorage, RandomSampler
    from torchrl.data import TensorDictReplayBuffer as Theirs

    theirs = Theirs(storage=LazyTensorStorage(100), sampler=RandomSampler(), batch_size=16)
    for buffer in (rb, theirs):
        buffer.extend(transitions(30))
    found, expected = rb.sample(), theirs.sample()
    names = set(found.keys(include_nested=True, leaves_only=True)) - {"priority_weight"}
    assert names == set(expected.keys(include_nested=True, leaves_only=True))
    for name in names:
        assert (found[name].shape, found[name].dtype) == (expected[name].shape, expected[name].dtype), name


def test_torchrls_dqn_loss_takes_batches_and_its_td_errors_are_fed_back(rb):
    from torchrl.objectives import DQNLoss

    network = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action_value"])
    from tensordict.nn import TensorDictSequential
    from torchrl.modules import QValueModule

    loss_module = DQNLoss(TensorDictSequential(network, QValueModule(action_space="one-hot")), action_space="one-hot")
    rb.extend(transitions(50))
    td = rb.sample()
    loss = loss_module(td)["loss"]
    loss.backward()
    rb.update_tensordict_priority(td)
    expected = {int(i): float(e) for i, e in zip(td["index"], td["td_error"], strict=True)}  # the last one wins
    found = rb.buffer.priorities(torch.tensor(list(expected)))
    assert found.tolist() == pytest.approx([abs(e) for e in expected.values()], rel=1e-3, abs=1e-4)
    assert rb.buffer.stats().updated == 16


@pytest.mark.parametrize("n_step", [1, 3])
def test_without_the_adapter_a_batch_has_the_targets_and_weights_of_its_discounts(n_step):
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss, ValueEstimators

    gamma, g, steps = 0.9, torch.Generator().manual_seed(0), 40
    spec = {"obs": tr.Field((4,)), "action": tr.Field((), torch.int64), "reward": tr.Field()}
    spec |= {"terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}
    network = nn.Linear(4, 2)
    loss_module = DQNLoss(
        QValueActor(network, in_keys=["obs"], action_space="categorical"), action_space="categorical", reduction="none"
    )
    loss_module.make_value_estimator(ValueEstimators.TD0, gamma=gamma)
    view = tr.Transitions(n_step=n_step, gamma=gamma)
    with tr.ReplayBuffer(spec, 200, view=view, sampler=tr.Prioritized(1.0, 0.5), seed=0) as buffer:
        for terminated in (True, False):
            end = torch.arange(steps) == steps - 1
            buffer.extend(
                obs=torch.randn(steps + 1, 4, generator=g),
                action=torch.randint(0, 2, (steps,), generator=g),
                reward=torch.randn(steps, generator=g),
                terminated=end & terminated,
                truncated=end & (not terminated),
            )
        buffer.update_priorities(buffer.keys(), 1 + torch.rand(2 * steps, generator=g))
        batch = buffer.sample(256)
        td = batch.to_tensordict(column=True)
        td["priority_weight"] = td["weight"]
        td["steps_to_next_obs"] = td["discount"].log() / math.log(gamma)
        loss = loss_module(td)["loss"]
        with torch.no_grad():
            target = batch["reward"] + batch["discount"] * network(batch["next_obs"]).amax(1)
            error = network(batch["obs"]).gather(1, batch["action"][:, None])[:, 0] - target
        assert batch["terminated"].any()
        assert td["td_error"][:, 0].numpy() == pytest.approx(error.square().numpy(), rel=1e-4, abs=1e-6)
        assert loss.detach().numpy() == pytest.approx((batch["weight"] * error.square()).numpy(), rel=1e-4, abs=1e-6)


def test_td_errors_of_rows_that_are_gone_reach_nobody(rb):
    rb.extend(transitions(100))
    td = rb.sample()
    rb.extend(transitions(100, seed=1))
    rb.update_priority(td["index"], torch.full((16, 1), 7.0))
    assert rb.buffer.priorities(rb.buffer.keys()).max() == pytest.approx(1, abs=1e-3)
    assert rb.buffer.stats().stale_updates > 0


def test_first_priorities_come_with_the_rows(rb):
    td = transitions(10)
    td["td_error"] = torch.arange(10.0)
    index = rb.extend(td)
    assert rb.buffer.priorities(index).tolist() == pytest.approx(list(range(10)), abs=1e-3)
    assert "td_error" not in rb.sample()


def test_batches_of_several_dimensions_are_so_many_rows(rb):
    assert len(rb.extend(transitions(12, batch_size=(3, 4)))) == 12
    assert rb.add(transitions(1)[0]) == 12
    assert len(rb) == 13
    rb.extend(rb.sample())  # what a batch has beside the rows is left out
    assert len(rb) == 29


def write_from_another_process(data):
    rb = pickle.loads(data)
    rb.extend(transitions(5, seed=9))
    return len(rb)


@pytest.mark.slow
def test_another_process_writes_into_the_same_rows(rb):
    rb.init(transitions(1))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        assert processes.submit(write_from_another_process, pickle.dumps(rb)).result() == 5
    assert len(rb) == 5
    assert (rb.sample(8).exclude("index", "priority_weight")["observation"] != 0).any()


def test_a_buffer_of_unknown_rows_is_not_pickled(rb):
    with pytest.raises(RuntimeError, match="nobody knows yet what a row is"):
        pickle.dumps(rb)
    with pytest.raises(RuntimeError, match="call extend"):
        rb.sample()


def test_empty_dumps_and_loads(rb, tmp_path):
    rb.extend(transitions(20))
    rb.dumps(tmp_path / "rows")
    before = rb.buffer.gather(rb.buffer.keys())["observation"]
    rb.empty()
    assert len(rb) == 0
    rb.loads(tmp_path / "rows")
    assert torch.equal(rb.buffer.gather(rb.buffer.keys())["observation"], before)


def test_loaded_rows_are_drawn_with_the_schedule_of_the_constructor(tmp_path):
    def beta(batches):
        return 0.25 if batches < 2 else 1.0

    made = [TensorDictReplayBuffer(50, batch_size=8, sampler=tr.Prioritized(0.6, beta), seed=0) for _ in range(2)]
    made[0].extend(transitions(20))
    made[0].dumps(tmp_path)
    made[1].loads(tmp_path)
    assert made[1].buffer.sampler.beta is beta
    other = TensorDictReplayBuffer(50, batch_size=8, sampler=tr.Prioritized(0.9, beta))
    other.loads(tmp_path)
    assert other.buffer.sampler == tr.Prioritized(0.9, beta)
    keys = other.buffer.keys()
    assert torch.equal(other.buffer.gather(keys)["observation"], made[0].buffer.gather(keys)["observation"])


def test_one_priority_stands_for_all_and_no_rows_change_nothing(rb):
    assert rb.extend(transitions(0)).tolist() == []
    index = rb.extend(transitions(6))
    rb.update_priority(index[:3], 4.0)
    rb.update_priority(5, 2.0)
    assert rb.buffer.priorities(index).tolist() == pytest.approx([4, 4, 4, 1, 1, 2], rel=1e-3)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"a": torch.ones(3)}, TypeError, "expected a TensorDict"),
        (TensorDict({"a": torch.ones(3)}, []), ValueError, r"add\(td\) writes one row"),
        (TensorDict({"a": torch.ones(3, 2)}, [3]), ValueError, "observation"),
    ],
)
def test_what_is_no_rows_is_refused(rb, data, error, message):
    rb.extend(transitions(3))
    with pytest.raises(error, match=message):
        rb.extend(data)
    assert len(rb) == 3


def test_td_errors_that_are_nan_are_refused(rb):
    index = rb.extend(transitions(3))
    with pytest.raises(ValueError, match="NaN"):
        rb.update_priority(index, torch.full((3,), float("nan")))
    rb.batch_size = None
    with pytest.raises(ValueError, match="batch_size is missing"):
        rb.sample()


THEIRS = """
import json, sys, torch
from benchmarks.peers.torchrl import prioritized
from tensordict import TensorDict

errors = torch.tensor(json.loads(sys.argv[1]))
buffer = prioritized(len(errors), 64)
buffer.update_priority(buffer.extend(TensorDict({"row": torch.arange(len(errors))}, [len(errors)])), errors)
torch.manual_seed(0)
batches = [buffer.sample() for _ in range(400)]
pairs = [(int(i), float(w)) for batch in batches for i, w in zip(batch["index"], batch["priority_weight"])]
print("found", json.dumps(pairs))
"""


@pytest.mark.slow
def test_draws_and_weights_are_those_of_torchrls_prioritized_sampler():
    pytest.importorskip("torchrl")
    errors = (0.1 + torch.rand(50, generator=torch.Generator().manual_seed(3))).tolist()
    command = [sys.executable, "-c", THEIRS, json.dumps(errors)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    theirs = json.loads(child.stdout.split("found ")[1])

    rb = TensorDictReplayBuffer(len(errors), batch_size=64, sampler=tr.Prioritized(0.6, 0.4), seed=0)
    rb.update_priority(rb.extend(TensorDict({"row": torch.arange(50)}, [50])), torch.tensor(errors))
    batches = [rb.sample() for _ in range(400)]
    ours = [(int(i), float(w)) for td in batches for i, w in zip(td["index"], td["priority_weight"], strict=True)]
    rb.buffer.close()

    expected = torch.tensor(errors, dtype=torch.float64) ** 0.6  # both add at most 1e-6 to an error
    expected *= len(ours) / expected.sum()
    for pairs in (ours, theirs):
        counts = torch.bincount(torch.tensor([i for i, _ in pairs]), minlength=50)
        statistic = ((counts - expected) ** 2 / expected).sum().item()
        assert statistic < 110  # chi-square with 49 degrees of freedom: 110 is exceeded once in 700,000 times
    weights = dict(ours)
    ratios = [weights[i] / w for i, w in theirs]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-3)  # each divides by a constant of its own
