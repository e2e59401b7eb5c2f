"""`torchreplay peek` prints rows, and writes images as PNG."""

import io

import numpy as np
import pytest
import stored_buffers
import torch
from click.testing import CliRunner
from PIL import Image

import torchreplay as tr
from torchreplay.cli import main
from torchreplay.files.images import is_image, pixels

FORMS = ["file", "directory", "archive"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return stored_buffers.make(tmp_path_factory.mktemp("stored"))


def run(*arguments):
    return CliRunner().invoke(main, ["peek", *(str(argument) for argument in arguments)])


def rows_in(output):
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("row ")]


@pytest.mark.parametrize("form", FORMS)
def test_the_newest_rows_come_first(stored, form):
    assert rows_in(run("-n", 3, stored.forms[form]).output) == [69, 68, 67]


@pytest.mark.parametrize("form", FORMS)
def test_the_oldest_rows_on_request(stored, form):
    assert rows_in(run("--oldest", "-n", 2, stored.forms[form]).output) == [20, 21]


@pytest.mark.parametrize("form", FORMS)
def test_rows_by_key_with_their_values(stored, form):
    output = run("--key", 33, stored.forms[form]).output
    assert rows_in(output) == [33]
    values = {line.split()[0]: line.split()[1] for line in output.splitlines()[1:]}
    at = 33 - 20
    assert values["action"] == str(int(stored.columns()["action"][at]))
    assert values["reward"] == f"{float(stored.columns()['reward'][at]):.6g}"
    assert f"{float(stored.buffer.priorities(torch.tensor([33]))):.4g}" in output


def test_a_key_that_is_gone_is_refused_with_those_that_are_held(stored):
    result = run("--key", 3, stored.forms["file"])
    assert result.exit_code == 2
    assert "there is no row with key 3: the keys held are 20 to 69" in result.output


@pytest.mark.parametrize("form", FORMS)
def test_images_are_pngs_of_the_pixels(stored, form, tmp_path):
    result = run("--images", tmp_path / "images", "-n", 4, stored.forms[form])
    assert f"4 images in {tmp_path / 'images'}" in result.output
    for key in (66, 67, 68, 69):
        found = np.asarray(Image.open(tmp_path / "images" / f"{key}-obs.png"))
        np.testing.assert_array_equal(found, stored.columns()["obs"][key - 20].numpy())


def test_an_empty_buffer_has_no_rows_to_print(tmp_path):
    with tr.ReplayBuffer({"x": tr.Field()}, 8, path=tmp_path / "b.bin"):
        result = run(tmp_path / "b.bin")
    assert (result.exit_code, result.output) == (0, "")


def test_images_of_a_spec_without_any_are_refused(tmp_path):
    with tr.ReplayBuffer({"x": tr.Field()}, 8, path=tmp_path / "b.bin") as buffer:
        buffer.extend(x=torch.zeros(1))
        result = run("--images", tmp_path, tmp_path / "b.bin")
    assert result.exit_code == 2
    assert "no field is an image" in result.output


@pytest.mark.parametrize("shape", [(84, 84), (84, 96, 3), (3, 84, 96), (4, 84, 84), (84, 84, 1)])
def test_bytes_with_height_and_width_are_images(shape):
    assert is_image(tr.Field(shape, torch.uint8))
    assert not is_image(tr.Field(shape, torch.float32))


@pytest.mark.parametrize("shape", [(), (128,), (4, 4), (17, 6), (20, 84, 84), (2, 3, 84, 84)])
def test_other_shapes_are_none(shape):
    assert not is_image(tr.Field(shape, torch.uint8))


def test_colours_stay_colours_and_stacked_frames_stand_side_by_side():
    colours = torch.randint(0, 256, (3, 10, 12), dtype=torch.uint8)
    np.testing.assert_array_equal(pixels(colours), colours.permute(1, 2, 0).numpy())
    stack = torch.randint(0, 256, (4, 10, 12), dtype=torch.uint8)
    np.testing.assert_array_equal(pixels(stack), np.concatenate([frame.numpy() for frame in stack], axis=1))


SAID = {"picture": tr.Ragged(torch.uint8), "text": tr.Ragged(torch.uint8), "points": tr.Ragged(torch.float32, (3,))}


def encoded(kind):
    content = io.BytesIO()
    Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3)).save(content, kind)
    return content.getvalue()


def test_bytes_are_shown_as_the_pictures_and_texts_that_they_are(tmp_path):
    file = tmp_path / "b.bin"
    rows = [
        (encoded("JPEG"), "größer [bold]", [[1, 2, 3]]),
        (encoded("PNG"), "x" * 500, []),
        (b"\x00\x01\x02" * 5, "", np.arange(30).reshape(10, 3)),
    ]
    with tr.ReplayBuffer(SAID, 8, path=file, ragged_bytes=1 << 16) as buffer:
        for picture, text, points in rows:
            buffer.writer().append(picture=picture, text=text.encode(), points=points)
        output = run("--oldest", file).output
        shown = [line.split(None, 1)[1] for line in output.splitlines() if not line.startswith("row")]
        assert shown[0].startswith("a JPEG picture")
        assert shown[0].endswith(f"uint8 [{len(rows[0][0])}]")
        assert shown[1].startswith("'größer [bold]'")
        assert shown[2].startswith("1, 2, 3")
        assert shown[3].startswith("a PNG picture")
        assert shown[4].startswith("'" + "x" * 50 + "...'")
        assert shown[5].startswith("nothing")
        assert shown[6].startswith("0 to 2")
        assert shown[7].startswith("nothing")
        assert shown[8].startswith("0 to 29")
        result = run("--oldest", "--images", tmp_path / "images", file)
        assert f"2 images in {tmp_path / 'images'}" in result.output
        assert (tmp_path / "images" / "0-picture.jpeg").read_bytes() == rows[0][0]
        assert (tmp_path / "images" / "1-picture.png").read_bytes() == rows[1][0]


def test_rows_whose_pages_were_taken_again_are_not_shown(tmp_path):
    file = tmp_path / "b.bin"
    with tr.ReplayBuffer({"x": tr.Ragged(torch.int32)}, 100, path=file, ragged_bytes=16 * 64) as buffer:
        for n in range(40):
            buffer.writer().append(x=[n] * 30)  # two pages of sixteen
        assert rows_in(run("--oldest", "-n", 100, file).output) == list(range(32, 40)), "nobody has absorbed"
        assert buffer.keys().tolist() == list(range(32, 40))


def items_in(output):
    return {int(line.split()[1]): line.split(maxsplit=2)[2] for line in output.splitlines() if line.startswith("row ")}


def test_a_row_says_what_is_known_of_its_item(tmp_path):
    flag = tr.Field((), torch.bool)
    spec = {"obs": tr.Field(), "reward": tr.Field(), "terminated": flag, "truncated": flag}
    unseen, none = "nobody has looked at it yet", "its item cannot be drawn"
    path = tmp_path / "b.bin"
    with tr.ReplayBuffer(spec, 8, view=tr.Transitions(), path=path) as buffer, buffer.writer() as writer:
        writer.reset(obs=0)
        writer.step(obs=1, reward=0, terminated=False, truncated=False)
        assert items_in(run(path).output) == {0: unseen, 1: unseen}
        assert buffer.num_items == 1
        assert items_in(run(path).output) == {0: "priority 1", 1: none}  # it may start one when the next step comes
        writer.step(obs=2, reward=0, terminated=True, truncated=False)
        assert items_in(run(path).output) == {0: "priority 1", 1: none, 2: unseen}
        buffer.discard([0])
        assert items_in(run(path).output) == {0: none, 1: "priority 1", 2: none}
        buffer.save(tmp_path / "saved")
        assert items_in(run(tmp_path / "saved").output) == {0: none, 1: "priority 1", 2: none}


def test_what_a_queue_has_handed_out_cannot_be_drawn(tmp_path):
    with tr.ReplayBuffer({"x": tr.Field()}, 8, sampler=tr.Fifo(), path=tmp_path / "b.bin") as queue:
        queue.extend(x=torch.zeros(3))
        queue.sample(2)
        unknown, held = "priority 1", "its item cannot be drawn"
        assert items_in(run(tmp_path / "b.bin").output) == {0: held, 1: held, 2: unknown}
