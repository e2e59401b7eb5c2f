"""Ape-X with explorers on other nodes of a cluster that the example starts by itself."""

import pytest
from example_programs import evaluations, succeed

QUICK = "--total-steps 60 --eval-every 30 --eval-episodes 2 --learning-starts 300 --num-explorers 2 --solved-at 501"

pytest.importorskip("ray")
pytest.importorskip("gymnasium")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.mark.soak
@pytest.mark.parametrize("shards", [[], ["--shards"]], ids=["one buffer", "shards"])
def test_explorers_on_two_other_nodes_feed_the_learner(tmp_path, shards):
    done = succeed("cluster", tmp_path, *QUICK.split(), *shards, timeout=170)
    lines = evaluations(done)
    assert [line["step"] for line in lines] == [30, 60]
    assert all(line["rows"] >= 300 for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shards", [[], ["--shards"]], ids=["one buffer", "shards"])
def test_explorers_on_two_other_nodes_solve_cartpole_within_five_minutes(tmp_path, shards):
    done = succeed("cluster", tmp_path, *shards, timeout=300)
    assert evaluations(done)[-1]["mean_return"] >= 475
