"""Processes that die at any numbered step of their work, one by one and in random pairs: the others go on."""

import re

import failed_draws
import faulty_deaths
import group_deaths
import pytest
import stopped_writers
from fault_build import ROOT, FaultyInterpreter, build
from numbered_items import VIEWS

import torchreplay as tr
from torchreplay import _C

NAMES = ["rows", *VIEWS]
FEW = ["rows", "3 steps of 4 frames"]
OF_LONG_VALUES = {"draw.measures_again", "import.pages", "pages.hole", "pages.voided"}
"""Where processes come that meet within a few instructions. `tests/cpp/write/test_page_ring.cpp` makes writers meet,
and in `tests/cpp/draw/test_ragged_redraws.cpp` a writer comes in where a draw measures rows. Restores die at their
points in `tests/cpp/deaths/test_page_deaths.cpp`."""


@pytest.fixture(scope="module")
def faulty():
    with FaultyInterpreter(build()) as interpreter:
        yield interpreter


def declared():
    """The fault points in the sources."""
    sources = [path.read_text() for path in (ROOT / "cpp").rglob("*.h") if path.name != "fault.h"]
    return sorted(point for source in sources for point in re.findall(r'TORCHREPLAY_FAULT\("(.*?)"\)', source))


@pytest.mark.slow
def test_a_fault_build_knows_every_fault_point_and_there_is_a_process_that_comes_there(faulty):
    reached, known = faulty.run(faulty_deaths.rehearse_all, FEW)
    assert known == declared(), "every point has a name of its own"
    assert reached == [point for point in known if point not in OF_LONG_VALUES]
    assert set(known) >= OF_LONG_VALUES


def test_an_ordinary_build_has_no_fault_points():
    assert len(declared()) > 90
    assert not hasattr(_C, "arm_fault")
    native = (ROOT / "torchreplay" / "_C.abi3.so").read_bytes()
    assert [point for point in declared() if point.encode() in native] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_death_at_any_fault_point_leaves_the_buffer_to_the_others(faulty, name):
    assert faulty.run(faulty_deaths.die_at_every_point, name, False, 1) > 60


@pytest.mark.slow
def test_a_death_where_items_are_dropped_counts_each_once(faulty):
    assert faulty.run(faulty_deaths.die_where_items_are_dropped) > 100


@pytest.mark.parametrize("name", FEW)
def test_an_explorers_death_at_any_step_loses_at_most_the_row_being_written(faulty, name):
    faulty.run(faulty_deaths.lose_the_row_being_written, name, 3)


def test_a_learner_killed_in_a_change_of_the_grid_leaves_each_item_its_old_priority_or_its_new_one(faulty):
    faulty.run(faulty_deaths.kill_in_changes_of_the_grid)


@pytest.mark.parametrize("interrupt", [False, True], ids=["timeout", "Ctrl-C"])
def test_a_draw_that_ends_early_in_a_redraw_is_not_counted_and_the_next_has_its_name(faulty, interrupt):
    faulty.run(failed_draws.end_a_redraw, interrupt)


@pytest.mark.parametrize("max_draws", [None, 1])
def test_the_last_batch_of_an_epoch_becomes_shorter_by_the_rows_that_go_while_it_is_drawn(faulty, max_draws):
    assert faulty.run(failed_draws.lose_items_of_a_last_batch, max_draws) == [1, 8]


def test_draws_that_could_not_go_back_at_once_go_back_once_and_not_in_a_forked_child_too(faulty):
    came, most = faulty.run(failed_draws.owe_draws_in_a_process_that_forks)
    assert came == most


def test_a_death_while_draws_go_back_leaves_each_item_used_up_or_back(faulty):
    assert faulty.run(failed_draws.die_while_draws_go_back) == 1


@pytest.mark.parametrize(
    ("limiter", "admitted"),
    [
        (tr.MinSize(100), 1000),  # as often as one likes
        (tr.MinSize(101), 0),
        (tr.SamplesPerInsert(2.0, min_size=100, tolerance=0.1), 20),
    ],
    ids=repr,
)
def test_rows_written_while_a_buffer_is_cleared_stay_and_count(faulty, limiter, admitted):
    assert faulty.run(failed_draws.write_while_it_is_cleared, limiter) == (100, admitted)


@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "killed"])
@pytest.mark.parametrize("linked", [False, True], ids=["rows", "episodes"])
def test_a_writer_stopped_in_a_row_stops_nobody_in_a_queue_and_its_row_comes_first_or_never(faulty, linked, killed):
    faulty.run(stopped_writers.turn_beside_a_stopped_writer, linked, killed)


@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "killed"])
@pytest.mark.parametrize("linked", [False, True], ids=["rows", "episodes"])
def test_writers_and_learners_turn_a_queue_beside_a_stopped_writer_and_all_comes_once(faulty, linked, killed):
    others, late = faulty.run(stopped_writers.turn_in_many_processes, linked, killed)
    assert others == [1]
    assert late == ([not linked, 0, 0] if killed else [1, 1, 1])


def test_a_row_that_a_stopped_writer_of_a_queue_wrote_before_all_died_is_in_the_file(faulty, tmp_path):
    came = faulty.run(stopped_writers.reopen_what_a_stopped_writer_wrote_last, tmp_path / "queue.replay")
    assert came == [1001, 320, 321, 322, 323]


def test_writers_that_wait_for_a_stopped_one_because_of_a_window_and_who_looks_at_the_queue_are_told_its_name(faulty):
    faulty.run(stopped_writers.name_a_stopped_writer)


def test_a_writer_that_finds_no_pages_between_those_of_stopped_ones_says_so(faulty):
    faulty.run(stopped_writers.name_pages_of_stopped_writers)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_deaths_at_two_random_fault_points_leave_the_buffer_to_the_survivor(faulty, name):
    assert faulty.run(faulty_deaths.die_in_pairs, name, 15, 2) > 15


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_a_death_at_any_fault_point_in_any_scene_leaves_the_buffer_to_the_others(faulty, name):
    assert faulty.run(faulty_deaths.die_at_every_point, name, True, 4) > 400
    faulty.run(faulty_deaths.lose_the_row_being_written, name, 5)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_deaths_at_500_pairs_of_random_fault_points_leave_the_buffer_to_the_survivor(faulty, name):
    assert faulty.run(faulty_deaths.die_in_pairs, name, 500, 6) > 500


def tell(tally, deaths):
    for role, count in deaths.items():
        tally(f"{role}s killed", count)


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["two learners", "a learner that saves"])
def test_a_generator_a_learner_of_groups_and_a_publisher_killed_at_what_they_share_lose_double_and_leak_nothing(
    faulty, scene, tally
):
    deaths = faulty.run(group_deaths.kill_at_every_point, scene, 1, 8, ("admit.", "claims.", "publish."))
    assert sum(deaths.values()) > 10
    tell(tally, deaths)


@pytest.mark.parametrize("scene", group_deaths.EVEN_AT_RANDOM)
def test_generators_and_learners_of_groups_killed_at_random_lose_double_and_leak_nothing(faulty, scene, tally):
    tell(tally, faulty.run(group_deaths.kill_at_random, scene, 12, 3))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scene", group_deaths.SCENES)
def test_a_generator_a_learner_of_groups_and_a_publisher_killed_at_any_point_lose_double_and_leak_nothing(
    faulty, scene, tally
):
    deaths = faulty.run(group_deaths.kill_at_every_point, scene, 2, 9)
    deaths += faulty.run(group_deaths.kill_at_every_point, scene, 24, 9, ("claims.let_go",))  # half a batch is back
    assert sum(deaths.values()) > 100
    tell(tally, deaths)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scene", group_deaths.EVEN_AT_RANDOM)
def test_hundreds_of_random_deaths_among_generators_and_learners_of_groups_lose_double_and_leak_nothing(
    faulty, scene, tally
):
    for seed in range(100, 150):
        tell(tally, faulty.run(group_deaths.kill_at_random, scene, 12, seed))
