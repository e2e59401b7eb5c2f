"""The protocol of the shared memory, model-checked: the right one holds in every interleaving, each naive one fails.

`model/README.md` says what is modelled. SPIN (Debian package `spin`) and gcc are needed.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass

import pytest
from paths import TESTS

MEMORY_MB = 6000
DEPTH = 1_000_000

# What a configuration does not say. Bit n of FIRSTS and ENDS: row n of that writer starts, or ends, an episode.
DEFAULTS = (
    "SPAN=2 HISTORY=1 ROWS1=0 ROWS2=0 ROWS3=0 ROUNDS=1 ROUNDS2=0 FIRSTS1=1 FIRSTS2=1 FIRSTS3=1 ENDS1=0 ENDS2=0 ENDS3=0"
    " REWRITES=0 DISCARDS=0 STAMPS=3"
)
PAIRS = "CAP=2 SPAN=1 HISTORY=0"  # items of two rows

THREE_ROWS = "CAP=3 ROWS1=3 ENDS1=4 ROWS2=2 MAXT=5"
RIGHT = {
    "items of three rows with a frame, an end, two writers": THREE_ROWS,
    "a stream of items with frames turns the ring": "CAP=4 ROWS1=6 MAXT=7 ROUNDS=2",
    "two episodes of one stream": "CAP=3 ROWS1=5 FIRSTS1=9 ENDS1=4 MAXT=6 ROUNDS=2",
    "items of two rows, two writers": f"{PAIRS} ROWS1=3 ROWS2=1 MAXT=4",
    "two learners": f"{PAIRS} ROWS1=3 MAXT=4 ROUNDS2=1",
    "a writer killed": f"{PAIRS} ROWS1=3 ROWS2=1 MAXT=4 WKILL=1 K=1",
    "a writer killed, its id taken by another": "CAP=3 ROWS1=2 ROWS3=2 MAXT=4 WKILL=1 K=1",
    "a learner killed, one that goes on": "CAP=3 ROWS1=3 ENDS1=4 MAXT=3 LKILL=1 K=4 ROUNDS2=1",
    "a learner killed, then the one that repairs": f"{PAIRS} ROWS1=2 MAXT=3 LKILL=1 K=4 K2=5 ROUNDS2=1",
    "a row rewritten beside a writer and a learner": f"{PAIRS} ROWS1=3 MAXT=4 REWRITES=1",
    "rewritten so often that the marks come round": f"{PAIRS} ROWS1=2 MAXT=2 REWRITES=3 STAMPS=2",
    "the one who rewrites killed": f"{PAIRS} ROWS1=2 MAXT=3 REWRITES=1 LKILL=1 K=7",
    "an item discarded": f"{PAIRS} ROWS1=3 MAXT=4 DISCARDS=1",
    "the one who discards killed": f"{PAIRS} ROWS1=2 MAXT=3 DISCARDS=1 LKILL=1 K=7",
    "a learner killed beside one who discards": f"{PAIRS} ROWS1=2 MAXT=2 DISCARDS=1 LKILL=1 K=4",
}
GATE_RIGHT = {
    "a learner that dies at any step": "ROWS=2 CALLS=2 STRANGER=0",
    "anything written to the gate at any moment": "ROWS=2 CALLS=1 STRANGER=1",
}
GATE_DIES = GATE_RIGHT["a learner that dies at any step"]
GATE_NAIVE = {"LOOKFIRST": (GATE_DIES, "assertion violated"), "NOGIVINGUP": (GATE_DIES, "non-progress cycle")}
TWO_WRITERS = f"{PAIRS} ROWS1=3 ROWS2=1 MAXT=4"
RECOVERER_DIES = "LKILL=1 K=4 K2=5 ROUNDS2=1"
NAIVE = {
    "WAIT": (THREE_ROWS, "every_row_is_absorbed"),
    "SKIP": (THREE_ROWS, "every_row_is_absorbed"),
    "TICKETJUMP": (f"{PAIRS} ROWS1=1 ROWS2=2 MAXT=4", "every_row_is_absorbed"),
    "NODEFER": (THREE_ROWS, "complete_is_drawable"),
    "OWNLEAF": (THREE_ROWS, "drawable_is_complete"),
    "STACKLEAF": (THREE_ROWS, "drawable_is_complete"),
    "ROWPREV": (TWO_WRITERS, "drawable_is_complete"),
    "NOEND": ("CAP=3 ROWS1=3 ENDS1=4 MAXT=3", "complete_is_drawable"),
    "FRAMELESS": ("CAP=3 ROWS1=5 MAXT=6", "drawable_is_complete"),
    "CROSSLINK": ("CAP=3 ROWS1=4 FIRSTS1=5 ENDS1=2 MAXT=4", "links_agree"),
    "ANYKEY": (f"{PAIRS} ROWS1=4 MAXT=4", "copy_is_the_row_drawn"),
    "TRUSTNEXT": (TWO_WRITERS, "copy_follows_the_stream"),
    "UPDRES": (f"{TWO_WRITERS} WKILL=1 K=1", "drawable_is_complete"),
    "EARLYRECLAIM": (f"{PAIRS} ROWS1=1 ROWS2=3 MAXT=4 ROUNDS=2", "copy_is_whole"),
    "NORECLAIM": (f"{PAIRS} ROWS1=1 ROWS3=2 MAXT=4 WKILL=1 K=1", "no_slot_stays_busy"),
    "RECLEAF": (f"{PAIRS} ROWS1=2 MAXT=3 LKILL=1 K=4", "complete_is_drawable"),
    "RECNODEFER": (f"{PAIRS} ROWS1=2 MAXT=2 LKILL=1 K=4 ROUNDS2=1", "complete_is_drawable"),
    "RECNOPEND": (f"{PAIRS} ROWS1=2 MAXT=2 LKILL=1 K=4 ROUNDS2=1", "complete_is_drawable"),
    "RECCLEAN": (f"{PAIRS} ROWS1=2 MAXT=2 {RECOVERER_DIES}", "complete_is_drawable"),
    "ATFIRST": (f"{PAIRS} ROWS1=4 MAXT=4 {RECOVERER_DIES}", "priority_is_its_own"),
    "NOBUSY": (f"{PAIRS} ROWS1=3 MAXT=4 REWRITES=1", "rewrite_stays"),
    "NOSTAMP": (f"{PAIRS} ROWS1=2 MAXT=2 REWRITES=2", "batch_has_one_version"),
    "NOLOOK": (f"{PAIRS} ROWS1=2 MAXT=2 REWRITES=1", "batch_has_one_version"),
    "NORECORD": (f"{PAIRS} ROWS1=2 MAXT=2 REWRITES=1 LKILL=1 K=7", "row_is_old_or_new"),
    "LEAFONLY": (f"{PAIRS} ROWS1=2 MAXT=2 DISCARDS=1", "discarded_is_not_drawn"),
}


QUEUE_DEFAULTS = (
    "SPAN=0 ROWS1=0 ROWS2=0 ROWS3=0 FIRSTS1=1 FIRSTS2=1 FIRSTS3=1 ENDS1=0 ENDS2=0 ENDS3=0"
    " LEARNERS=1 BATCH=1 MAXDRAWS=1 RELEASES=0 POLLS=0 STAY=0"
)
TWO_TAKE = "CAP=2 ROWS1=2 MAXT=3 LEARNERS=2"
LEARNER_DIES = "LKILL=1 K=4"
PASSED_ROWS = f"CAP=2 ROWS1=3 MAXT=3 LEARNERS=2 {LEARNER_DIES}"
TWO_STREAMS = "SPAN=1 CAP=3 ROWS1=2 ROWS2=2 MAXT=9"
EPISODES_OF_ONE_ROW = "SPAN=1 CAP=3 ROWS1=3 FIRSTS1=3 MAXT=5 STAY=1"
ID_TAKEN = "SPAN=1 CAP=3 ROWS1=1 ROWS3=2 MAXT=7 WKILL=1 K=1 STAY=1"
STOPS = "CAP=2 ROWS1=2 ROWS2=2 MAXT=6 STOPS=1"
GOES_AT_ONCE = "SPAN=1 CAP=2 ROWS1=2 ROWS2=1 MAXT=6"
STREAM_AND_LEARNER_DIES = f"SPAN=1 CAP=3 ROWS1=2 ROWS2=1 MAXT=5 {LEARNER_DIES}"
TWOS = f"{TWO_TAKE} BATCH=2 {LEARNER_DIES}"
QUEUE_RIGHT = {
    "one writer turns the ring": "CAP=2 ROWS1=3 MAXT=4",
    "a stream turns the ring": "SPAN=1 CAP=2 ROWS1=3 MAXT=5 STAY=1",
    "two writers": "CAP=2 ROWS1=2 ROWS2=2 MAXT=6",
    "two learners take twos, give some back, each item twice": (
        "CAP=2 ROWS1=3 MAXT=4 LEARNERS=2 BATCH=2 RELEASES=1 MAXDRAWS=2 POLLS=1"
    ),
    "a writer killed": "CAP=2 ROWS1=2 ROWS2=1 MAXT=6 WKILL=1 K=1",
    "a writer killed while it looks for room": "CAP=2 ROWS1=3 MAXT=4 WKILL=1 LKILL=1 K=1 POLLS=1",
    "a learner killed, one that goes on, each item twice": f"{TWO_TAKE} {LEARNER_DIES} MAXDRAWS=2 RELEASES=1 LAZY=1",
    "both learners killed": f"{TWO_TAKE} {LEARNER_DIES} K2=5 LAZY=1",
    "a learner killed, two writers": f"CAP=2 ROWS1=2 ROWS2=1 MAXT=4 {LEARNER_DIES}",
    "a learner killed, one that goes on, rows that are passed": PASSED_ROWS,
    "a writer killed, then a learner": "CAP=2 ROWS1=2 MAXT=3 WKILL=1 K=1 K2=4 LEARNERS=2",
    "episodes of two rows": "SPAN=1 CAP=2 ROWS1=4 FIRSTS1=5 ENDS1=2 MAXT=6 STAY=1",
    "an episode that is broken off": EPISODES_OF_ONE_ROW,
    "two streams": f"{TWO_STREAMS} STAY=1",
    "two streams, writers that go at once": GOES_AT_ONCE,
    "two streams, a writer killed": f"{TWO_STREAMS} WKILL=1 K=1",
    "a stream's writer killed, its id taken by another": ID_TAKEN,
    "two streams, a learner killed": STREAM_AND_LEARNER_DIES,
    "two writers, rows to be drawn are kept, too": "CAP=2 ROWS1=2 ROWS2=2 MAXT=6 STARVED=1",
    "a learner killed, rows to be drawn are kept, too": (
        f"CAP=2 ROWS1=3 MAXT=4 LEARNERS=2 {LEARNER_DIES} RELEASES=1 STARVED=1"
    ),
    "two writers, one is stopped in a row": STOPS,
    "two writers, one is stopped in a row, and killed": "CAP=2 ROWS1=1 ROWS2=2 MAXT=6 STOPS=1 WKILL=1 K=1",
    "two writers, one is stopped in a row, a learner killed": f"CAP=2 ROWS1=1 ROWS2=1 MAXT=4 STOPS=1 {LEARNER_DIES}",
    "two streams, one is stopped in a row": "SPAN=1 CAP=4 ROWS1=2 ROWS2=3 MAXT=9 STOPS=1 STAY=1",
    "a stream, a learner killed, one that goes on": f"SPAN=1 CAP=2 ROWS1=3 MAXT=5 LEARNERS=2 {LEARNER_DIES}",
    "a learner of twos killed, one that goes on": TWOS,
    "both learners of twos killed, each item twice": f"{TWOS} K2=5 LAZY=1 MAXDRAWS=2",
}
QUEUE_NAIVE = {
    "FETCHADD": ("CAP=2 ROWS1=2 ROWS2=2 MAXT=6", "needed_row_stays"),
    "PASSBY": ("CAP=2 ROWS1=2 ROWS2=2 MAXT=6", "needed_row_stays"),
    "LEASE": (TWO_TAKE, "nobody_else_has_it"),
    "TWOSTORES": (f"{TWO_TAKE} {LEARNER_DIES}", "every_item_is_delivered"),
    "FORGETDRAWS": (f"{TWO_TAKE} {LEARNER_DIES} MAXDRAWS=2", "not_handed_out_again"),
    "CLAIMFIRST": (PASSED_ROWS, "item_is_not_dropped"),
    "NODEFERFIRST": (EPISODES_OF_ONE_ROW, "no_room_is_lost"),
    "NOSINCE": (ID_TAKEN, "no_room_is_lost"),
    "DEADLATE": (GOES_AT_ONCE, "needed_row_stays"),
    "NOKEEP": (TWO_STREAMS, "writers_go_on"),
    "NOBUSY": (STOPS, "writers_go_on"),
    "NOWALK": ("SPAN=1 CAP=3 ROWS1=3 ROWS2=2 MAXT=9", "copy_is_the_item"),
    "HALFCOMMIT": (TWOS, "commit_is_whole"),
    "ENDFIRST": (TWOS, "commit_is_whole"),
    "HEADFIRST": (f"SPAN=1 CAP=3 ROWS1=2 ROWS2=2 MAXT=8 LEARNERS=2 {LEARNER_DIES}", "item_is_not_dropped"),
}

# Bits 2n and 2n + 1 of SIZES: how many pages row n of that writer has.
PAGES_DEFAULTS = (
    "CAP=3 PAGES=4 ROWS1=0 ROWS2=0 ROWS3=0 SIZES1=0 SIZES2=0 SIZES3=0 ROUNDS=1 QUEUE=0 STOP=0 MAXT=3 MAXP=6"
)
TWO_TWO_ONE = "ROWS1=3 SIZES1=26"  # the third run is where the first one was
ONE_AND_TWOS = "ROWS1=1 SIZES1=1 ROWS2=2 SIZES2=10 MAXP=8"  # the second writer's runs are all pages
ONE_STOPS = f"{ONE_AND_TWOS} STOP=1 ROUNDS=0"
WRITER_DIES = "WKILL=1 K=1"
PAGES_QUEUE = "QUEUE=1 ROWS1=2 SIZES1=10 ROWS2=1 SIZES2=2 MAXT=5 MAXP=10"
PAGES_QUEUE_DEATH = f"QUEUE=1 {ONE_AND_TWOS} MAXT=4 {WRITER_DIES}"
PAGES_RIGHT = {
    "two writers": "ROWS1=2 SIZES1=9 ROWS2=1 SIZES2=2",
    "one writer turns both rings, a row has no page": "ROWS1=4 SIZES1=162 MAXT=5 MAXP=9 ROUNDS=2",
    "a writer killed, one that goes on": f"{ONE_AND_TWOS} MAXT=4 {WRITER_DIES} ROUNDS=0 GOON=1",
    "a writer stopped for good, one that goes on": f"{ONE_STOPS} GOON=1",
    "a writer killed, its id taken by another": f"ROWS1=1 SIZES1=2 ROWS3=1 SIZES3=2 {WRITER_DIES}",
    "a learner killed": f"{TWO_TWO_ONE} {LEARNER_DIES}",
    "a queue, two writers": PAGES_QUEUE,
    "a queue, a writer killed": PAGES_QUEUE_DEATH,
}
PAGES_NAIVE = {
    "NOLOOK": (TWO_TWO_ONE, "copy_is_whole"),
    "NOFOLLOW": (TWO_TWO_ONE, "drawable_has_its_pages"),
    "ROWFIRST": (TWO_TWO_ONE, "failed_draw_is_gone"),
    "NOWAIT": (TWO_TWO_ONE, "drawable_has_its_pages"),
    "ADOPTGONE": (ONE_AND_TWOS, "drawable_has_its_pages"),
    "NORECLAIM": (f"ROWS1=1 SIZES1=1 {WRITER_DIES}", "no_page_stays_busy"),
    "KEEPBUSY": ("ROWS1=1 SIZES1=1 ROWS2=3 SIZES2=41 MAXT=4 MAXP=8", "no_page_stays_busy"),
    "STEAL": ("PAGES=1 ROWS1=1 SIZES1=1 ROWS2=1 SIZES2=1", "drawable_has_its_pages"),
    "WAITBUSY": (ONE_STOPS, "invalid end state (at depth"),
    "NOPAGELIMIT": (PAGES_QUEUE, "needed_row_stays"),
    "SAYLATE": (PAGES_QUEUE, "needed_row_stays"),
    "LOOKLATE": (PAGES_QUEUE, "needed_row_stays"),
    "ORPHAN": (f"QUEUE=1 ROWS1=1 SIZES1=1 {WRITER_DIES}", "no_room_is_lost"),
}


ADMITTED = "CAP=2 BATCH=1 ITEMS=2 DRAWS=3 KILLS=1"
GOES_ON = "CAP=2 BATCH=1 ITEMS=1 DRAWS=2 KILLS=1 GOES_ON=1"
ADMISSION_RIGHT = {
    "two writers and a learner, one of them killed": ADMITTED,
    "two of them killed": "CAP=2 BATCH=1 ITEMS=2 DRAWS=3 KILLS=2",
    "batches of two": "CAP=2 BATCH=2 ITEMS=2 DRAWS=2 KILLS=1",
    "another learner goes on": GOES_ON,
    "and items may be of two versions": f"{GOES_ON} AGE=1",
}
ADMISSION_NAIVE = {
    "ROWSFIRST": (ADMITTED, "(truth<="),
    "GIVEFIRST": (ADMITTED, "(truth<="),
    "NOLOG": (ADMITTED, "(n==truth"),
    "NORECLAIM": (ADMITTED, "(n==truth"),
    "NOAGAIN": (GOES_ON, "(truth<="),
    "COUNTLATE": (GOES_ON, "(n==truth"),
    "NOLEARNT": (GOES_ON, "(n==truth"),
    "LEARNTFIRST": (GOES_ON, "(n==truth"),
}


@dataclass(frozen=True)
class Model:
    """What is checked of one model.

    Attributes:
        right: Configurations in which it holds, by name.
        naive: Of each variant without a rule, the configuration, and the assertion that fails or what SPIN reports.
        defaults: What configurations do not say.
        flags: Of the verifier: of states, or of cycles.
        arguments: Likewise.
    """

    right: dict[str, str]
    naive: dict[str, tuple[str, str]]
    defaults: str = ""
    flags: tuple[str, ...] = ("-DSAFETY", "-DNOFAIR")
    arguments: tuple[str, ...] = ()


MODELS = {
    "replay": Model(RIGHT, NAIVE, DEFAULTS),
    "gate": Model(GATE_RIGHT, GATE_NAIVE, flags=("-DNP",), arguments=("-l", "-f")),  # cycles in which none gets on
    "queue": Model(QUEUE_RIGHT, QUEUE_NAIVE, QUEUE_DEFAULTS),
    "pages": Model(PAGES_RIGHT, PAGES_NAIVE, PAGES_DEFAULTS),
    "admission": Model(ADMISSION_RIGHT, ADMISSION_NAIVE),
}


def verify(folder, name, configuration):
    """SPIN's report on every state that `configuration` can reach, up to the first error."""
    if not shutil.which("spin"):
        pytest.fail("the model of the protocol needs SPIN: `apt-get install spin`, or build it from spinroot.com")
    model = MODELS[name]
    values = dict(define.split("=") for define in f"{model.defaults} {configuration}".split())
    defines = [f"-D{key}={value}" for key, value in values.items()]
    subprocess.run(["spin", "-a", *defines, TESTS / "model" / f"{name}.pml"], cwd=folder, check=True)
    options = ["-O1", "-w", *model.flags, f"-DMEMLIM={MEMORY_MB}", "-DVECTORSZ=2048"]
    subprocess.run(["gcc", *options, "pan.c", "-o", "pan"], cwd=folder, check=True)
    report = subprocess.run(
        ["./pan", *model.arguments, f"-m{DEPTH}", "-w22"], cwd=folder, capture_output=True, text=True, check=True
    )
    print(report.stdout)  # noqa: T201  the number of states, with `pytest -rP`
    return report.stdout


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("model", "name"), [(model, name) for model in MODELS for name in MODELS[model].right])
def test_model_holds_in_every_interleaving(tmp_path, model, name):
    report = verify(tmp_path, model, MODELS[model].right[name])
    assert re.search(r"errors: 0\b", report), report
    assert "Search not completed" not in report, report
    assert "too small" not in report, report


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("model", "variant"), [(model, name) for model in MODELS for name in MODELS[model].naive])
def test_naive_variant_breaks_what_the_rule_is_for(tmp_path, model, variant):
    configuration, verdict = MODELS[model].naive[variant]
    report = verify(tmp_path, model, f"{configuration} {variant}=1")
    assert (verdict if " " in verdict else f"assertion violated {verdict}") in report, report
