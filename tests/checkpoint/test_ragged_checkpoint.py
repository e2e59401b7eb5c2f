"""Rows of any length in checkpoints and copies: they come back as they were written, and damaged ones are refused."""

import io
import logging
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from ragged_model import RaggedModel, random_values, split
from saved_rows import change_rows, tell, told_by

import torchreplay as tr
from torchreplay.checkpoint import buffer_checkpoint
from torchreplay.checkpoint.safetensors_io import write_shard

SPEC = {
    "tokens": tr.Ragged(torch.int32),
    "flags": tr.Ragged(torch.bool, like="tokens"),
    "points": tr.Ragged(torch.float64, (3,)),
    "reward": tr.Field(),
    "prompt": tr.Field((2,), torch.int64),
}
SAMPLERS = {
    "uniform": tr.Uniform(),
    "prioritized": tr.Prioritized(0.7, 0.5),
    "epochs": tr.Uniform(replacement=False),
    "max_draws": tr.Uniform(max_draws=3),
}

pytestmark = pytest.mark.usefixtures("small_files")


def write(buffer, model, random, rows, longest=30):
    with buffer.writer() as writer:
        for _ in range(rows):
            values = random_values(random, SPEC, longest)
            writer.append(**values)
            model.append(values)


def filled(rows=100, capacity=40, ragged_bytes=12_000, sampler=None, seed=0, longest=30):
    """A buffer whose both rings have turned, and what it should hold."""
    model = RaggedModel(SPEC, capacity, ragged_bytes)
    buffer = tr.ReplayBuffer(SPEC, capacity, ragged_bytes=ragged_bytes, sampler=sampler, seed=seed)
    write(buffer, model, np.random.default_rng(seed), rows, longest)
    return buffer, model


def written_anew(model, capacity, ragged_bytes):
    """The rows that a model holds and that have a slot, written one after the other into a ring of another size."""
    anew = RaggedModel(SPEC, capacity, ragged_bytes)
    held = {key for key in keys_of(model) if key >= len(model.rows) - capacity}
    for key, (values, _) in enumerate(model.rows):
        anew.append(values) if key in held else anew.rows.append((values, None))
    return anew


def keys_of(model):
    return list(model.keys())


def assert_holds(buffer, model, keys):
    """The rows with these keys, and no others, with the values of the model."""
    assert buffer.keys().tolist() == list(keys)
    batch = buffer.gather(range(len(model.rows)))
    assert batch["key"].tolist() == list(keys)
    for name, field in SPEC.items():
        expected = [model.value(key, name) for key in keys]
        for got, value in zip(split(batch, name), expected, strict=True):
            assert got.dtype == value.dtype
            assert np.array_equal(got, value)
        if isinstance(field, tr.Ragged):
            assert batch.lengths(name).tolist() == [len(value) for value in expected]


def through_a_directory(buffer, tmp_path, **arguments):
    buffer.save(tmp_path)
    return tr.ReplayBuffer.load(tmp_path, **arguments)


def through_an_archive(buffer, tmp_path, **arguments):
    file = io.BytesIO()
    buffer.save(file)
    file.seek(0)
    return tr.ReplayBuffer.load(file, **arguments)


def through_a_file(buffer, tmp_path, **arguments):
    buffer.save(tmp_path / "saved")
    return tr.ReplayBuffer.load(tmp_path / "saved", path=tmp_path / "rows.bin", **arguments)


def through_a_restore(buffer, tmp_path, capacity=None, ragged_bytes=None):
    buffer.save(tmp_path)
    sizes = capacity or buffer.capacity, ragged_bytes or buffer.stats().ragged_bytes
    restored = tr.ReplayBuffer(SPEC, sizes[0], ragged_bytes=sizes[1], sampler=buffer.sampler)
    restored.restore(tmp_path)
    return restored


def by_a_copy(buffer, tmp_path, **arguments):
    return buffer.copy(**arguments)


WAYS = [through_a_directory, through_an_archive, through_a_file, through_a_restore, by_a_copy]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_values_lengths_keys_priorities_and_draws_come_back(sampler, way, tmp_path):
    buffer, model = filled(sampler=SAMPLERS[sampler], seed=3)
    for _ in range(3):
        batch = buffer.sample(8)
        if sampler == "prioritized":
            buffer.update_priorities(batch, torch.rand(8) + 1)
    found = way(buffer, tmp_path)
    assert found.spec == SPEC
    keys = buffer.keys().tolist()
    assert set(keys) == set(model.keys()) if sampler != "max_draws" else set(keys) <= set(model.keys())
    assert_holds(found, model, keys)
    same = ("size", "drawable", "inserted", "sampled", "updated", "draws", "priority_max", "ragged_bytes")
    assert [getattr(found.stats(), name) for name in same] == [getattr(buffer.stats(), name) for name in same]
    assert found.stats().priority_total == pytest.approx(buffer.stats().priority_total)
    if way is not through_a_restore:
        for _ in range(4):
            ours, theirs = buffer.sample(4), found.sample(4)
            assert ours["key"].tolist() == theirs["key"].tolist()
            assert torch.equal(ours["tokens"], theirs["tokens"])
            assert torch.equal(ours["weight"], theirs["weight"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_go_on_leaving_in_the_order_of_their_keys(seed, way, tmp_path):
    buffer, model = filled(rows=70 + seed, seed=seed)
    found = way(buffer, tmp_path)
    again, gone = written_anew(model, 40, 12_000), set(range(len(model.rows))) - set(model.keys())
    random = np.random.default_rng(seed + 100)
    for _ in range(12):
        write(found, again, random, 5)
        assert_holds(found, again, [key for key in keys_of(again) if key not in gone])
        assert found.stats().ragged_fill == pytest.approx(again.fill)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("capacity", "ragged_bytes"), [(None, 5_000), (15, None), (15, 4_000), (100, 60_000)])
def test_the_newest_rows_that_fit_are_loaded_and_the_number_of_the_others_is_told(
    capacity, ragged_bytes, way, tmp_path, caplog
):
    buffer, model = filled(rows=90)
    sizes = capacity or 40, ragged_bytes or 12_000
    smaller = written_anew(model, *sizes)
    held = model.keys()
    keys = [key for key in keys_of(smaller) if key in held]
    with caplog.at_level(logging.WARNING):
        given = {"capacity": capacity, "ragged_bytes": ragged_bytes}
        found = way(buffer, tmp_path, **{name: size for name, size in given.items() if size})
    if way is by_a_copy and capacity and ragged_bytes:  # which sees no row before it places those before
        keys = found.keys().tolist()
        assert keys == held[-len(keys) :]
        assert len(keys) > 3
    assert_holds(found, model, keys)
    assert (found.capacity, found.stats().ragged_bytes) == sizes
    lost = [key for key in held[-sizes[0] :] if key not in keys]
    assert bool(lost) == ("left out" in caplog.text)
    if lost:
        assert f"left out the oldest {len(lost)} rows, up to key {max(lost)}" in caplog.text


FLAG = tr.Field((), torch.bool)
EPISODES = {
    "obs": {"text": tr.Ragged(torch.uint8), "mask": tr.Ragged(torch.float32, like="obs/text")},
    "said": tr.Ragged(torch.int16),
    "reward": tr.Field(),
    "terminated": FLAG,
    "truncated": FLAG,
}
VIEWS = [
    tr.Transitions(),
    tr.Transitions(n_step=3),
    tr.Transitions(stack={"obs/text": 2}),
    tr.Sequences(4),
    tr.Sequences(3, burn_in=1),
]


def play(buffer, random, episodes):
    with buffer.writer() as writer:
        for _ in range(episodes):
            length = int(random.integers(1, 8))
            for step in range(length + 1):
                size, spoken = (int(n) for n in random.integers(0, 20, 2))
                obs = {"text": bytes(random.integers(0, 256, size).tolist()), "mask": random.random(size)}
                said = {"said": random.integers(0, 99, spoken), "reward": random.random()}
                if step:
                    writer.step(obs=obs, **said, terminated=step == length, truncated=False)
                else:
                    writer.reset(obs=obs)


def items(buffer):
    """Every item that can be drawn: all tensors of it, by key."""
    keys = buffer.keys()
    found = {}
    for key in keys.tolist():
        batch = buffer.gather([key])
        if len(batch["key"]):
            found[key] = [tensor.tolist() for tensor in torch.utils._pytree.tree_leaves(dict(batch.items()))]
    return found


@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize("way", [through_a_directory, by_a_copy])
def test_items_of_every_view_come_back(view, way, tmp_path):
    buffer = tr.ReplayBuffer(EPISODES, 60, view=view, ragged_bytes=6_000, sampler=tr.Prioritized(), seed=1)
    play(buffer, np.random.default_rng(5), 30)
    batch = buffer.sample(8)
    buffer.update_priorities(batch, torch.rand(8) + 1)
    found = way(buffer, tmp_path)
    assert items(found) == items(buffer)
    assert len(items(found)) > 5
    ours, theirs = buffer.sample(8), found.sample(8)
    assert ours["key"].tolist() == theirs["key"].tolist()
    assert torch.equal(ours["said"], theirs["said"])
    play(found, np.random.default_rng(6), 30)


def test_another_view_and_another_sampler_make_other_items_of_the_same_rows(tmp_path):
    written = [tr.ReplayBuffer(EPISODES, 60, view=view, ragged_bytes=1 << 16) for view in (VIEWS[0], VIEWS[3])]
    for buffer in written:
        play(buffer, np.random.default_rng(5), 8)
    written[0].save(tmp_path)
    found = tr.ReplayBuffer.load(tmp_path, view=VIEWS[3], sampler=tr.Prioritized(0.7))
    wanted = items(written[1])
    assert items(found).keys() == wanted.keys()
    for key in wanted:
        assert torch.equal(found.gather([key])["said"], written[1].gather([key])["said"])


@pytest.mark.parametrize("tiny", [False, True], ids=["fields of one shape fit", "they do not"])
def test_rows_longer_than_a_file_come_back(tiny, tmp_path, monkeypatch):
    if tiny:
        monkeypatch.setattr(buffer_checkpoint, "SHARD_BYTES", 24)
    buffer, model = filled(rows=60, capacity=30, ragged_bytes=1 << 18, longest=500)
    assert max(sum(v.nbytes for v in values.values()) for values, _ in model.rows) > 8192
    buffer.save(tmp_path)
    assert_holds(tr.ReplayBuffer.load(tmp_path), model, model.keys())
    assert_holds(buffer.copy(), model, model.keys())


def test_rows_that_leave_while_they_are_saved_are_in_the_checkpoint_whole_or_not_at_all(tmp_path):
    spec = {
        "key": tr.Ragged(torch.int64),
        "more": tr.Ragged(torch.int32, (2,), like="key"),
        "number": tr.Field((), torch.int64),
    }
    spec = {"x": spec.pop("key"), "y": tr.Ragged(torch.int32, (2,), like="x"), "number": spec["number"]}
    buffer = tr.ReplayBuffer(spec, 50, ragged_bytes=40_000)
    over = threading.Event()

    def go_on():
        with buffer.writer() as writer:
            number = 0
            while not over.is_set():
                n = number * 37 % 250
                x = np.full(n, number)
                number = writer.append(x=x, y=np.stack([x, -x], 1), number=number) + 1

    writer = threading.Thread(target=go_on)
    writer.start()
    try:
        while len(buffer) < 20:
            pass
        found = []
        for turn in range(15):
            buffer.save(tmp_path / str(turn))
            found.append(tr.ReplayBuffer.load(tmp_path / str(turn)))
            found.append(buffer.copy())
    finally:
        over.set()
        writer.join()
    for loaded in found:
        batch = loaded.gather(loaded.keys())
        assert batch.lengths("x").tolist() == (batch["number"] * 37 % 250).tolist()
        each = torch.repeat_interleave(batch["number"], batch.lengths("x"))
        assert torch.equal(batch["x"], each)
        assert torch.equal(batch["y"], torch.stack([each, -each], 1).int())
    assert sum(len(loaded) for loaded in found) > 100


@pytest.mark.parametrize("again", [False, True])
def test_a_long_row_that_leaves_while_it_is_written_is_left_out(again, tmp_path, monkeypatch):
    buffer = tr.ReplayBuffer({"x": tr.Ragged(torch.uint8)}, 20, ragged_bytes=20 * 8192)
    rows = [bytes([number]) * 8000 for number in range(60)]
    buffer.extend(x=rows[:20])
    written = []

    def overwriting(path, tensors, room):
        written.append(path)
        if len(written) == 4:
            buffer.extend(x=rows[20:40] if again else rows[20:24])  # the pages of rows 0 to 3, and all after them
        return write_shard(path, tensors, room)

    monkeypatch.setattr(buffer_checkpoint, "write_shard", overwriting)
    monkeypatch.setattr(buffer_checkpoint, "WRITES", 1)
    buffer.save(tmp_path)
    batch = (loaded := tr.ReplayBuffer.load(tmp_path)).gather(loaded.keys())
    keys = batch["key"].tolist()
    assert [part.tobytes() for part in split(batch, "x")] == [rows[key] for key in keys]
    assert 3 not in keys
    assert ({*range(26, 40)} if again else {*range(6, 20)}) <= {*keys}


def test_a_row_that_is_rewritten_while_its_values_are_saved_is_exact(tmp_path, monkeypatch):
    buffer = tr.ReplayBuffer({"x": tr.Ragged(torch.uint8), "n": tr.Field((), torch.int64)}, 4, ragged_bytes=1 << 16)
    buffer.extend(x=[bytes([number]) * 6000 for number in range(4)], n=[0, 1, 2, 3])

    def rewriting(path, tensors, room):
        buffer.rewrite([0, 1, 2, 3], n=[10, 11, 12, 13])
        return write_shard(path, tensors, room)

    monkeypatch.setattr(buffer_checkpoint, "write_shard", rewriting)
    buffer.save(tmp_path)
    batch = tr.ReplayBuffer.load(tmp_path).gather(range(4))
    assert batch["n"].tolist() == [10, 11, 12, 13]
    assert [part.tobytes() for part in split(batch, "x")] == [bytes([number]) * 6000 for number in range(4)]


def one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(buffer_checkpoint, "SHARD_BYTES", 1 << 20)
    buffer, model = filled(rows=20)
    buffer.save(tmp_path)
    (path,) = tmp_path.glob("rows-*/*")
    return path, model


def changed(name, change):
    return lambda tensors: tensors | {name: change(tensors[name])}


def with_one(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[3] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("/lengths/tokens", lambda t: t.int()), "column 1 of the rows has another type"),
        (changed("/lengths/tokens", lambda t: t.long()), "column 1 of the rows has another type"),
        (changed("/lengths/tokens", with_one(2**32 - 1)), "key 3 has values of length 4294967295"),
        (changed("/lengths/points", with_one(2**31)), "key 3 has values of length"),
        (changed("/lengths/points", with_one(126)), "took at most 3000 bytes, a quarter of the ragged_bytes=12000"),
        (
            changed("/lengths/tokens", lambda t: (t.long() + 1).to(torch.uint32)),
            r"key \d+ has \d+ elements of 'tokens', and there are \d+",
        ),
        (
            changed("/lengths/tokens", lambda t: torch.zeros_like(t)),
            "elements of 'tokens', and the lengths add up to 0: the last row has key 19",
        ),
        (changed("/lengths/tokens", lambda t: t[:-1].clone()), "column 1 of the rows has another type or shape"),
        (changed("tokens", lambda t: t[:-1].clone()), r"the row with key \d+ has \d+ elements of 'tokens'"),
        (changed("flags", lambda t: t[:-1].clone()), r"elements of 'flags', and there are"),
        (changed("points", lambda t: t[:, :2].contiguous()), "column 2 of the rows has another type or shape"),
        (changed("points", lambda t: t.float()), "column 2 of the rows has another type or shape"),
        (lambda tensors: {n: t for n, t in tensors.items() if n != "/lengths/tokens"}, "/lengths/tokens"),
        (lambda tensors: {n: t for n, t in tensors.items() if n != "points"}, "points"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_with_the_file_and_the_row(change, message, tmp_path, monkeypatch):
    path, _ = one_file(tmp_path, monkeypatch)
    change_rows(tmp_path, change)
    with pytest.raises(tr.CheckpointError, match=message) as refused:
        tr.ReplayBuffer.load(tmp_path)
    assert path.name in str(refused.value)
    with tr.ReplayBuffer(SPEC, 40, ragged_bytes=12_000) as buffer:
        with pytest.raises(tr.CheckpointError, match=message):
            buffer.restore(tmp_path)
        assert len(buffer) == 0
        write(buffer, RaggedModel(SPEC, 40, 12_000), np.random.default_rng(1), 50)
        assert len(buffer.sample(5)["key"]) == 5


def test_a_file_that_changes_between_the_looks_at_its_lengths_and_at_its_rows_is_refused(tmp_path, monkeypatch):
    path, _ = one_file(tmp_path, monkeypatch)
    read = buffer_checkpoint._read_shards

    def reading(*args):
        for columns in read(*args):
            columns[5] = torch.roll(columns[5].long(), 1).to(torch.uint32)
            yield columns

    monkeypatch.setattr(buffer_checkpoint, "_read_shards", reading)
    with pytest.raises(tr.CheckpointError, match=f"{path.name} is damaged: the row with key .* has other lengths"):
        tr.ReplayBuffer.load(tmp_path)


@pytest.mark.parametrize("seed", range(40))
def test_any_damaged_byte_of_a_file_with_lengths_is_an_error(seed, tmp_path, monkeypatch):
    path, _ = one_file(tmp_path, monkeypatch)
    content = bytearray(path.read_bytes())
    at = int(np.random.default_rng(seed).integers(0, len(content) if seed % 2 else 700))
    content[at] ^= 1 << seed % 8
    path.write_bytes(content)
    with pytest.raises(tr.CheckpointError, match=path.name):
        tr.ReplayBuffer.load(tmp_path)
    path.write_bytes(content[:at])
    with pytest.raises(tr.CheckpointError, match=path.name):
        tr.ReplayBuffer.load(tmp_path)


def test_bytes_too_few_for_a_row_are_refused_with_those_that_would_do_and_nothing_is_damaged(tmp_path):
    saved, longest = tmp_path / "saved", 9000
    with tr.ReplayBuffer({"x": tr.Ragged(torch.uint8)}, 10, ragged_bytes=1 << 16) as buffer:
        buffer.extend(x=[b"a", bytes(longest)])
        buffer.save(saved)
        made = [
            lambda few: tr.ReplayBuffer.load(saved, ragged_bytes=few),
            lambda few: tr.ReplayBuffer.load(saved, ragged_bytes=few, path=tmp_path / "file"),
            lambda few: buffer.copy(ragged_bytes=few),
        ]
        for make in made:
            with pytest.raises(ValueError, match=f"key 1 has values of length {longest}.*a quarter of") as refused:
                make(1 << 15)
            assert type(refused.value) is ValueError  # no CheckpointError: nothing is wrong with the checkpoint
            assert not (tmp_path / "file").exists()
            enough = int(re.search(r"Choose ragged_bytes=(\d+) or more", str(refused.value))[1])
            assert 4 * longest <= enough < 4 * (longest + 8)
            with pytest.raises(ValueError, match="a quarter"):
                make(enough - 4 * 8)  # values begin at multiples of 8
            with make(enough) as found:
                assert bytes(found.gather([1])["x"].tolist()) == bytes(longest)
            (tmp_path / "file").unlink(missing_ok=True)
    with tr.ReplayBuffer({"x": tr.Ragged(torch.uint8)}, 10, ragged_bytes=1 << 15) as small:
        with pytest.raises(ValueError, match="intact, and does not fit: the row with key 1") as refused:
            small.restore(saved)
        assert type(refused.value) is ValueError
        assert small.extend(x=[b"b"]).tolist() == [0]


def test_a_format_without_lengths_has_no_ragged_fields_and_bytes_out_of_range_are_refused(tmp_path):
    with tr.ReplayBuffer({"x": tr.Ragged(torch.uint8)}, 10, ragged_bytes=1 << 16) as buffer:
        buffer.save(tmp_path)
    with pytest.raises(ValueError, match="ragged_bytes is 100"):
        tr.ReplayBuffer.load(tmp_path, ragged_bytes=100)
    tell(tmp_path, told_by(tmp_path) | {"format": 6})
    with pytest.raises(tr.CheckpointError, match="format 6 has no ragged fields"):
        tr.ReplayBuffer.load(tmp_path)


def test_a_buffer_of_fields_of_one_shape_takes_no_ragged_bytes(tmp_path):
    with tr.ReplayBuffer({"x": tr.Field()}, 10) as buffer:
        buffer.save(tmp_path)
        for call in (lambda: tr.ReplayBuffer.load(tmp_path, ragged_bytes=4096), lambda: buffer.copy(ragged_bytes=4096)):
            with pytest.raises(ValueError, match="the spec has no Ragged field"):
                call()


def test_what_explorers_write_beside_a_restore_stays_whatever_pages_it_takes(tmp_path, monkeypatch):
    saved, model = filled(rows=80)
    saved.save(tmp_path)
    buffer, random = tr.ReplayBuffer(SPEC, 40, ragged_bytes=12_000), np.random.default_rng(9)
    read = buffer_checkpoint._read_shards

    def reading(*args):
        for number, columns in enumerate(read(*args)):
            if number == 1:
                write(buffer, model, random, 15)
            yield columns

    monkeypatch.setattr(buffer_checkpoint, "_read_shards", reading)
    buffer.restore(tmp_path)
    newer, keys = list(range(80, 95)), buffer.keys().tolist()
    assert keys[-15:] == newer
    assert set(keys[:-15]) <= set(saved.keys().tolist())
    assert_holds(buffer, model, keys)
    write(buffer, model, random, 40)
    assert_holds(buffer, model, buffer.keys().tolist())


def failing_after(shards):
    yield next(shards)
    raise OSError("the disk is gone")


def test_a_restore_after_one_that_failed_loses_no_row_of_a_ring_whose_bytes_are_all_used(tmp_path, monkeypatch):
    quarter = (
        16 * 64
    )  # bytes of 16 pages, of 64 in all: four such rows fill the ring, if the first begins where it does
    spec, values = {"x": tr.Ragged(torch.uint8)}, [bytes([i]) * quarter for i in range(4)]
    for name, written in (("short", [bytes(quarter // 3)]), ("full", values)):
        with tr.ReplayBuffer(spec, 1000, ragged_bytes=4 * quarter) as saved:
            saved.extend(x=written)
            saved.save(tmp_path / name)
    with tr.ReplayBuffer(spec, 1000, ragged_bytes=4 * quarter) as buffer:
        read = buffer_checkpoint._read_shards
        with monkeypatch.context() as patch:
            patch.setattr(buffer_checkpoint, "_read_shards", lambda *args: failing_after(read(*args)))
            with pytest.raises(OSError, match="the disk is gone"):
                buffer.restore(tmp_path / "short")
        buffer.restore(tmp_path / "full")
        assert buffer.keys().tolist() == [0, 1, 2, 3]
        assert [bytes(value.tolist()) for value in split(buffer.gather(range(4)), "x")] == values
        assert buffer.extend(x=[bytes(1)]).tolist() == [4]
        assert buffer.keys().tolist() == [1, 2, 3, 4]


def test_the_statistics_of_a_checkpoint_without_rows_come_back(tmp_path):
    with tr.ReplayBuffer(SPEC, 40, ragged_bytes=12_000) as buffer:
        buffer.save(tmp_path)
        found = tr.ReplayBuffer.load(tmp_path)
        assert replace(found.stats(), learners=0) == replace(buffer.stats(), learners=0)
        write(found, RaggedModel(SPEC, 40, 12_000), np.random.default_rng(0), 5)
        assert found.keys().tolist() == [0, 1, 2, 3, 4]
