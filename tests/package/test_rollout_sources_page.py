"""The programs of `docs/rollout_sources.md` around vLLM, with a double that has these calls of its engine."""

import asyncio
import itertools
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from paths import ROOT
from safetensors.torch import load_file

import torchreplay as tr

PAGE = (ROOT / "docs" / "rollout_sources.md").read_text()
BLOCKS = [part.split("```")[0] for part in PAGE.split("```python\n")[1:]]
GENERATE, WEIGHTS = (next(block for block in BLOCKS if name in block) for name in ("AsyncLLM.", "WeightLoader:"))


class Engine:
    """Answers with what its weights are when a request begins. Requests are under way side by side."""

    def __init__(self, loader):
        self.loader, self.weights, self.loading, self.under_way, self.most = loader, None, False, 0, 0
        self.is_shut_down = False
        self.model_runner = SimpleNamespace(model=self)

    def load_weights(self, weights):
        self.weights = int(dict(weights)["weight"])

    def shutdown(self):
        self.is_shut_down = True

    async def collective_rpc(self, method, args):
        assert not self.loading
        self.loading = True
        await asyncio.sleep(0)
        getattr(self.loader, method)(self, *args)
        self.loading = False

    async def generate(self, text, params, request_id):
        self.under_way, began = self.under_way + 1, self.weights
        self.most = max(self.most, self.under_way)
        for _ in range(3):
            await asyncio.sleep(0)
        self.under_way -= 1
        logprobs = [{7: SimpleNamespace(logprob=-0.5)}, {9: SimpleNamespace(logprob=-0.25)}]
        answer = SimpleNamespace(token_ids=[7, 9], logprobs=logprobs, text=str(began))
        yield SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[answer] * params.n)


@pytest.fixture
def page(monkeypatch, tmp_path):
    """The names of both programs, and the engine that they make."""
    monkeypatch.chdir(tmp_path)
    names = {"MODEL": "a model", "reward_of": lambda text, answer: float(answer)}
    exec(WEIGHTS, names)
    weights = ModuleType("weights")
    vars(weights).update(names)
    monkeypatch.setitem(sys.modules, "weights", weights)
    engine = Engine(names["WeightLoader"])
    vllm = {
        "vllm": {"AsyncEngineArgs": SimpleNamespace, "SamplingParams": SimpleNamespace},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2)},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=lambda args: engine)},
    }
    for name, contents in vllm.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    exec(GENERATE, names)
    return SimpleNamespace(**names), engine


def test_each_rollout_has_the_version_that_the_engine_had_when_it_began_and_comes_in_time(page):
    page, engine = page
    spec = {name: tr.Field((), torch.int64) for name in ("prompt", "policy_version")} | {"reward": tr.Field()}
    spec |= {"tokens": tr.Ragged(torch.int32), "is_answer": tr.Ragged(torch.bool, like="tokens")}
    spec["log_prob"] = tr.Ragged(torch.float32, like="tokens")
    how = {"sampler": tr.Fifo(), "limiter": tr.Admission(batch_size=16, max_age=1), "ragged_bytes": 1 << 16}
    queue = tr.ReplayBuffer(spec, 256, **how)
    policy = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
    queue.policy_version = 5  # a run that goes on
    policy.weight.fill_(5)
    page.publish(policy, queue, queue.policy_version)
    prompts = ((number, f"prompt {number}") for number in itertools.count())
    with queue.expect_writers():
        generator = threading.Thread(target=lambda: asyncio.run(page.generate(queue, prompts)))
        generator.start()
        dataset, versions = tr.GroupDataset(queue, by="prompt", size=8, groups=2, steps=12), set()
        for version, batch in enumerate(dataset, 6):
            assert batch["reward"].tolist() == batch["policy_version"].tolist()
            assert batch["age"].max() <= 1
            assert batch.padded("tokens").tolist() == [[1, 2, 3, 7, 9]] * 16
            assert batch.padded("is_answer").tolist() == [[False] * 3 + [True] * 2] * 16
            assert batch.padded("log_prob").tolist() == [[0, 0, 0, -0.5, -0.25]] * 16
            versions |= set(batch["policy_version"].tolist())
            policy.weight.fill_(version)
            page.publish(policy, queue, version)
        queue.stop()
        generator.join()
    assert engine.is_shut_down
    assert len(versions) > 5
    assert 1 < engine.most <= 4  # (max_age + 1) * batch_size / 8 groups are under way at first


def test_weights_of_a_model_whose_layers_share_a_tensor_are_published_under_both_names(page):
    page, _ = page
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    page.publish(model, SimpleNamespace(), 4)
    found = load_file("versions/4.safetensors")
    assert found.keys() == {"embedding.weight", "head.weight"}
    assert all(torch.equal(value, model["head"].weight) for value in found.values())
