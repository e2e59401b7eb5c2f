"""Files with flipped bits: refused, or opened without harm to the rows that were not hit."""

import os
import random
import tempfile
from pathlib import Path

import pytest
import torch
from file_buffers import assert_priorities_add_up, image_of_a_closed_buffer, image_of_a_killed_process, rows
from forked import Forked, shared_counters

import torchreplay as tr


def try_damaged(image, path, content, damages, tally):
    """In a process of its own: a crash must be seen. Tallies refused, opened and the damage it is at."""
    expected = rows(0, 50)
    for number, damage in enumerate(damages):
        tally[2] = number
        damaged = bytearray(content)
        for position, mask in damage:
            damaged[position] ^= mask
        path.write_bytes(damaged)
        try:
            buffer = tr.ReplayBuffer.open(path)
        except tr.CheckpointError:
            tally[0] += 1
            continue
        tally[1] += 1
        batch = buffer.gather(torch.arange(50))
        wrong = ~(batch["wide"]["image"] == expected["wide"]["image"][batch["key"]]).all(1)
        wrong |= batch["number"] != batch["key"]
        assert int(wrong.sum()) + 50 - len(batch["key"]) <= len(damage), "a row that was not hit is another one"
        assert_priorities_add_up(buffer)
        try:
            buffer.update_priorities(buffer.sample(64), torch.rand(64))
            keys = buffer.extend(**rows(50, 150))
            assert torch.equal(buffer.gather(keys)["number"], torch.arange(100, 200))
        except tr.WouldBlockForever:  # its limiter was hit
            assert image is image_of_a_killed_process
        buffer.close()


def damage_everywhere(image, each, seed):
    """Flips bits of the header, table of participants, configuration and everything else; returns (refused, opened)."""
    chance = random.Random(seed)
    where = {"prefix": f"torchreplay_{os.getpid()}_", "dir": "/dev/shm"}  # where putting a file to rest takes no time
    with tempfile.TemporaryDirectory(**where) as directory:
        path = Path(directory) / "replay.bin"
        content = image(path)
        config = 4096 + 4096 * 64
        size = len(content)
        regions = [(0, 1024), (4096 - 64, 4096), (4096, config), (config, config + 600), (config, size), (0, size)]
        damages = []
        for start, end in regions:
            for _ in range(each):
                hits = chance.randint(1, 3)
                damages.append([(chance.randrange(start, end), 1 << chance.randrange(8)) for _ in range(hits)])
        tally = shared_counters(3)
        with Forked(try_damaged, image, path, content, damages, tally) as process:
            assert process.wait(1200) == 0, f"damage {damages[tally[2]]}"
    assert tally[0] + tally[1] == len(damages)
    return tally[0], tally[1]


IMAGES = [image_of_a_closed_buffer, image_of_a_killed_process]


@pytest.mark.parametrize("image", IMAGES)
def test_a_damaged_file_is_refused_or_opened_without_harm_to_the_rows_that_were_not_hit(image):
    refused, opened = damage_everywhere(image, 60, seed=7)
    assert refused > 60
    assert opened > 60


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("image", IMAGES)
def test_a_file_damaged_in_12_000_ways_is_refused_or_opened_without_harm_to_the_rows_that_were_not_hit(image):
    damage_everywhere(image, 2000, seed=8)
