"""The offline example learns more than what was recorded, from a file alone."""

import pytest
from example_programs import evaluations, succeed

NAME = "offline_cartpole"


@pytest.mark.slow
def test_it_does_better_than_the_player_whose_episodes_it_learns_from(tmp_path):
    lines = evaluations(succeed(NAME, tmp_path, "--seed", "1", "--total-steps", "2000", timeout=150))
    assert [line["step"] for line in lines] == [500, 1000, 1500, 2000]
    assert lines[-1]["mean_return"] > 2 * lines[-1]["recorded"]
    assert not list(tmp_path.iterdir())
