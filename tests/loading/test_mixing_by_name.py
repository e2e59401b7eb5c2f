"""`MixedDataset` with names: one batch of each buffer for learners with several agents."""

import copy
import pickle

import pytest
import torch
from mixed_buffers import take
from torch.utils.data import DataLoader, default_convert

import torchreplay as tr


@pytest.fixture
def agents():
    """Two agents that observe and act differently; rows hold their key."""
    red = tr.ReplayBuffer({"number": tr.Field((), torch.int64)}, 50, sampler=tr.Prioritized(1.0), seed=1)
    blue_spec = {"number": tr.Field((), torch.int32), "image": tr.Field((2, 2), torch.uint8)}
    blue = tr.ReplayBuffer(blue_spec, 30, sampler=tr.Prioritized(1.0), seed=2)
    red.extend(number=torch.arange(50))
    blue.extend(number=torch.arange(30, dtype=torch.int32), image=torch.ones(30, 2, 2, dtype=torch.uint8))
    buffers = {"red": red, "blue": blue}
    yield buffers
    for buffer in buffers.values():
        buffer.close()


def updated(agents):
    return {name: buffer.stats().updated for name, buffer in agents.items()}


def assert_priorities_are(buffer, keys, td):
    """Checks P(key) against |td| / sum for updated rows, and 1 / sum for the others."""
    raw = torch.ones(len(buffer), dtype=torch.float64)
    raw[keys] = td.double().abs()  # equal keys have equal errors here
    found = buffer.gather(torch.arange(len(buffer)))["probability"].double()
    torch.testing.assert_close(found, raw / raw.sum(), rtol=1e-4, atol=0)


def test_an_element_is_a_whole_batch_of_each_buffer_as_the_buffer_draws_it(agents):
    dataset = tr.MixedDataset(agents, 16, steps=3)
    assert dataset.counts == (16, 16)
    assert dataset.buffers == (agents["red"], agents["blue"])
    elements = list(dataset)
    assert len(elements) == len(dataset) == 3
    for batches in elements:
        assert type(batches) is dict
        assert list(batches) == ["red", "blue"]
        assert all(type(batch) is tr.ReplayBatch and batch.batch_size == 16 for batch in batches.values())
        assert list(batches["red"]) == ["number", "key", "weight", "probability"]
        assert list(batches["blue"]) == ["number", "image", "key", "weight", "probability"]
        assert batches["blue"]["image"].shape == (16, 2, 2)
        for batch in batches.values():
            assert torch.equal(batch["number"].long(), batch["key"])
            assert batch["weight"].eq(1).all()  # of the buffer alone, where all priorities are equal


WAYS = {
    "as it is": lambda batches: batches,
    "pickle": lambda batches: pickle.loads(pickle.dumps(batches)),
    "copy": copy.deepcopy,
    "convert": default_convert,
    "to": lambda batches: {name: batch.to("cpu") for name, batch in batches.items()},
}


@pytest.mark.parametrize("way", WAYS)
def test_td_errors_go_to_the_rows_of_the_buffer_of_their_name(agents, way):
    dataset = tr.MixedDataset(agents, 16)
    batches = WAYS[way](next(iter(dataset)))
    td = {"blue": -(5.0 + batches["blue"]["key"]), "red": 100.0 + batches["red"]["key"]}
    dataset.update_priorities(batches, td)
    for name, buffer in agents.items():
        assert_priorities_are(buffer, batches[name]["key"], td[name])


def test_a_buffer_without_td_errors_keeps_its_priorities(agents):
    dataset = tr.MixedDataset(agents, 16)
    batches = next(iter(dataset))
    dataset.update_priorities(batches, {"blue": torch.full((16,), 2.0)})
    assert updated(agents) == {"red": 0, "blue": 16}
    dataset.update_priorities({"red": batches["red"]}, {"red": torch.full((16,), 2.0)})
    agents["red"].update_priorities(batches["red"], torch.full((16,), 2.0))  # its batch is an ordinary one
    assert updated(agents) == {"red": 32, "blue": 16}


def test_feedback_that_does_not_fit_is_refused_and_nothing_is_applied(agents):
    dataset = tr.MixedDataset(agents, 16)
    batches, td = next(iter(dataset)), torch.full((16,), 2.0)
    both = {"red": td, "blue": td}
    turned = {"red": batches["blue"], "blue": batches["red"]}
    mixed, bad_key, no_key = (copy.copy(batches["blue"]) for _ in range(3))
    mixed["buffer"] = torch.zeros(16, dtype=torch.int64)
    bad_key["key"] = bad_key["key"].clone().index_fill(0, torch.tensor([5]), 30)
    del no_key["key"]
    for given, errors, message in [
        (batches, both | {"blue": td / 0}, "16 of 16 of the TD errors for 'blue' are NaN or infinite.*index 0"),
        (batches, both | {"blue": td[:3]}, r"the TD errors for 'blue' are torch.float32 \[3\]: expected \[16\]"),
        (
            batches,
            both | {"green": td},
            r"td has \['red', 'blue', 'green'\]: expected .* names out of \['red', 'blue'\]",
        ),
        (batches, td, r"td has Tensor: expected a dict with names out of \['red', 'blue'\]"),
        (batches["red"], both, r"batch has \['number', .*: expected a dict with names"),
        ([batches], both, "batch has list"),
        ({"red": batches["red"]}, both, "there are TD errors for 'blue', but its batch is None"),
        (turned, both, "the batch named 'red' was drawn from another buffer"),
        (batches | {"blue": mixed}, both, "the batch mixes items of several buffers"),
        (batches | {"blue": bad_key}, both, "key 30 at index 5 was never issued by buffer 'blue'.*nothing was applied"),
        (batches | {"blue": no_key}, both, "the 'key' of the batch named 'blue'"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataset.update_priorities(given, errors)
    assert updated(agents) == {"red": 0, "blue": 0}


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_share_the_steps_and_feedback_finds_its_way(agents, method):
    dataset = tr.MixedDataset(agents, 8, steps=5)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
    elements = list(loader)
    assert len(elements) == 5
    assert len({tuple(batches["red"]["key"].tolist()) for batches in elements}) == 5
    for batches in elements:
        dataset.update_priorities(batches, {name: 2.0 + batches[name]["number"] for name in agents})
    assert updated(agents) == {"red": 40, "blue": 40}
    keys = torch.cat([batches["blue"]["key"] for batches in elements])
    assert_priorities_are(agents["blue"], keys, 2.0 + keys)


def test_stopping_one_buffer_ends_the_iteration_and_a_state_resumes_it(agents):
    dataset = tr.MixedDataset(agents, 8, steps=5)
    iterator = iter(dataset)
    take(iterator, 3)
    state = dataset.state_dict()
    assert [(part["draws"], part["position"]) for part in state["parts"]] == [(3, 3)] * 2
    expected = [batches["blue"]["key"].tolist() for batches in iterator]
    dataset.load_state_dict(state)
    assert [batches["blue"]["key"].tolist() for batches in dataset] == expected
    agents["blue"].stop()
    assert list(dataset) == []


def test_the_device_takes_all_batches_and_a_wait_names_the_agent(agents):
    batches = next(iter(tr.MixedDataset(agents, 8, device="meta")))
    assert all(batch["number"].device.type == "meta" for batch in batches.values())
    green = tr.ReplayBuffer({"x": tr.Field()}, 10)
    with pytest.raises(tr.WouldBlockForever) as caught:
        next(iter(tr.MixedDataset({**agents, "green": green}, 8)))
    assert caught.value.__notes__ == [
        "It was the wait for buffer 'green' of MixedDataset({'red': 8, 'blue': 8, 'green': 8}, endless; use "
        "DataLoader(dataset, batch_size=None))."
    ]
