"""Pictures for terminals: what the terminal says, which protocol follows, and how a picture is encoded."""

import io
import os
import random
from base64 import b64decode
from pathlib import Path

import pytest
from PIL import Image

from eccon.console import images
from eccon.console.draw.text import clean
from eccon.console.pictures import cells, encode
from eccon.console.pictures.answers import Answers, Strainer
from eccon.console.pictures.gallery import Gallery, Picture
from eccon.console.pictures.protocol import Protocol, Setting, choose
from tests.console.graphics import decode_sixel

SAID = "\x1bP>|kitty(0.35.2)\x1b\\\x1b[6;20;10t\x1b[?62;4;22c"
KEYS = "ab\x1b[A\x1b[6~\x1b[97;5u\x1b[?2026;2$y\x1b[<0;3;4Mz"


@pytest.mark.parametrize("at", range(len(SAID) + 1))
def test_answers_in_two_pieces_with_keys_around_them(at: int) -> None:
    strainer = Strainer()
    strainer.asked(0.0)
    left = strainer.feed("x" + SAID[:at], 1.0) + strainer.tick(1.05)
    left += strainer.feed(SAID[at:] + KEYS, 1.09) + strainer.tick(60.0)
    assert left == "x" + KEYS
    assert strainer.answers == Answers("kitty(0.35.2)", frozenset({4, 22}), (10, 20), complete=True)


def test_answers_byte_by_byte_over_a_slow_link() -> None:
    strainer = Strainer()
    strainer.asked(0.0)
    now, left = 0.0, ""
    for byte in SAID:
        now += 0.09
        left += strainer.feed(byte, now) + strainer.tick(now + 0.08)
    assert (left, strainer.answers.complete) == ("", True)


@pytest.mark.parametrize(
    "cut", ["\x1bP>|kit", "\x1b[?62;", "\x1b[6;20;", "\x1b_Gi=1;O", "\x1bP>|ki\x1b[?62", "\x1b[?1\x1b[?2"]
)
def test_what_is_cut_off_is_no_key(cut: str) -> None:
    strainer = Strainer()
    strainer.asked(0.0)
    assert strainer.feed(cut, 0.0) + strainer.tick(9.0) == ""
    assert strainer.feed("q", 9.1) == "q"
    assert strainer.feed(cut, 10.0) + strainer.feed("\x1b[B", 10.1) == "\x1b[B"
    assert not strainer.holding


def test_keys_that_begin_as_an_answer_does_come_soon() -> None:
    strainer = Strainer()
    strainer.asked(0.0)
    for key in ("\x1b", "\x1bP", "\x1b_", "\x1b[", "\x1b[6"):
        assert strainer.feed(key, 1.0) == ""
        assert strainer.tick(1.05) == ""
        assert strainer.tick(1.11) == key
    assert strainer.feed("\x1b[6~\x1b[6;5~", 1.2) == "\x1b[6~\x1b[6;5~"
    assert strainer.feed("\x1b", 99.0) == "\x1b"  # no answer is expected any more


KITTY, SIXEL = Answers("kitty(0.35.2)", complete=True), Answers("", frozenset({4}), (8, 15), complete=True)


@pytest.mark.parametrize(
    ("setting", "environ", "answers", "protocol"),
    [
        ("auto", {}, Answers(), "blocks"),
        ("auto", {"TERM": "xterm-kitty"}, Answers(), "blocks"),
        ("auto", {}, KITTY, "kitty"),
        ("auto", {}, Answers("kitty(0.26.5)", complete=True), "blocks"),
        ("auto", {"TERM": "xterm-kitty"}, Answers(complete=True), "kitty"),
        ("auto", {"TERM": "xterm-kitty", "SSH_CONNECTION": "a"}, Answers(complete=True), "blocks"),
        ("auto", {"TERM": "xterm-kitty", "SSH_CONNECTION": "a"}, KITTY, "kitty"),
        ("auto", {}, Answers("ghostty 1.1.0", complete=True), "kitty"),
        ("auto", {"KITTY_WINDOW_ID": "1"}, Answers("XTerm(379)", complete=True), "blocks"),
        ("auto", {}, Answers("WezTerm 20240203-110809", frozenset({4}), (8, 15), complete=True), "iterm"),
        ("auto", {}, Answers("iTerm2 3.5.0", complete=True), "iterm"),
        ("auto", {"LC_TERMINAL": "iTerm2"}, Answers(complete=True), "iterm"),
        ("auto", {}, Answers("Konsole 24.1", frozenset({4}), (8, 15), complete=True), "sixel"),
        ("auto", {}, SIXEL, "sixel"),
        ("auto", {}, Answers("", frozenset({4}), None, complete=True), "blocks"),
        ("auto", {"TMUX": "/x"}, KITTY, "kitty"),  # as tmux told of the terminal around it
        ("auto", {"TMUX": "/x"}, Answers("WezTerm 2024", complete=True), "blocks"),
        ("auto", {"TERM": "screen-256color"}, SIXEL, "blocks"),
        ("kitty", {"TMUX": "/x"}, Answers(), "kitty"),
        ("iterm", {"TMUX": "/x"}, Answers(), "blocks"),
        ("sixel", {}, Answers(), "blocks"),
        ("sixel", {"TMUX": "/x"}, SIXEL, "sixel"),
        ("blocks", {}, KITTY, "blocks"),
        ("off", {}, KITTY, "off"),
    ],
)
def test_the_protocol(
    setting: Setting, environ: dict[str, str], answers: Answers, protocol: Protocol
) -> None:
    assert choose(setting, environ, answers) == protocol


def noise(width: int, height: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), random.Random(7).randbytes(width * height * 3))


def test_the_worst_picture_is_bounded_too() -> None:
    worst = noise(160, 120)
    for data in (encode.kitty(worst), encode.iterm(worst, 8, 3), encode.sixel(worst)):
        assert data is not None
        assert len(data) < encode.BYTES_MAX + 500
    assert encode.sixel(noise(400, 600)) is None  # shown in half blocks instead


@pytest.mark.parametrize("size", [(80, 60), (1, 1), (77, 5), (13, 47)])
def test_sixels_are_the_picture_in_whole_bands(size: tuple[int, int]) -> None:
    picture = Image.linear_gradient("L").resize(size).convert("RGB")
    data = encode.sixel(picture)
    assert data is not None
    drawn = decode_sixel(data[2:-2])
    height = max(size[1] // 6 * 6, 6)
    assert drawn.size == (size[0], height)
    expected = picture.resize(drawn.size)
    for x in range(size[0]):
        for y in range(height):
            assert all(
                abs(int(a) - int(b)) <= 12
                for a, b in zip(drawn.getpixel((x, y)), expected.getpixel((x, y)), strict=True)  # type: ignore[arg-type]
            )


def put(gallery: Gallery, name: str, image: Image.Image) -> Picture | None:
    key = name, 8, 3
    gallery.put(key, gallery.made(key, image))
    return gallery.get(key)


def test_a_gallery_gives_each_picture_its_own_id_and_takes_it_away() -> None:
    gallery = Gallery("kitty")
    image = Image.new("RGB", (400, 100), "red")
    one, two = put(gallery, "one", image), put(gallery, "two", image)
    assert one is not None
    assert two is not None
    assert (one.columns, one.rows) == (8, 1)  # four times as wide as high, in cells twice as high as wide
    assert one.number != two.number
    sent = gallery.sending(one.slot)
    assert sent.startswith(f"\x1b_Ga=T,U=1,i={one.number},f=100,c=8,r=1,q=2,m=0;")
    assert gallery.sending(one.slot) == ""
    assert Image.open(io.BytesIO(b64decode(sent.partition(";")[2][:-2]))).size == (80, 20)
    assert gallery.keep(()) == f"\x1b_Ga=d,d=I,i={one.number},q=2\x1b\\"  # the other one was never sent
    three = put(gallery, "three", image)
    assert three is not None
    assert three.slot not in (one.slot, two.slot)


def test_a_picture_made_for_other_cells_is_not_taken() -> None:
    gallery = Gallery("sixel")
    gallery.take(Answers(cell=(10, 20)))
    key = "one", 8, 3
    picture = gallery.made(key, noise(80, 60))
    gallery.take(Answers(cell=(12, 24)))
    gallery.put(key, picture)
    assert gallery.get(key) is None


def test_no_more_pictures_than_there_are_ids() -> None:
    gallery = Gallery("kitty")
    shown = [put(gallery, str(n), Image.new("RGB", (8, 8))) for n in range(cells.SLOTS + 1)]
    assert all(shown[:-1])
    assert shown[-1] is None


def test_through_tmux_the_commands_are_wrapped() -> None:
    gallery = Gallery("kitty", {"TMUX": "/tmp/tmux"})
    picture = put(gallery, "one", noise(80, 60))
    assert picture is not None
    pieces = gallery.sending(picture.slot).split("\x1bPtmux;")
    assert pieces[0] == ""
    assert len(pieces) > 2
    for piece in pieces[1:]:
        assert piece.startswith("\x1b\x1b_G")
        assert piece.endswith("\x1b\x1b\\\x1b\\")


def test_text_from_outside_draws_no_picture() -> None:
    assert clean(f"a{cells.line(3, 1, 2)}\U0010eeee\u0305z") == "a���\u0305z"


def test_a_thumbnail_of_what_is_no_image_or_never_ends(tmp_path: Path) -> None:
    broken, pipe, big = tmp_path / "x.png", tmp_path / "pipe.png", tmp_path / "big.png"
    broken.write_bytes(b"\x89PNG no")
    os.mkfifo(pipe)
    with big.open("wb") as file:
        file.truncate(2**33)
    for path in (broken, pipe, big, tmp_path, tmp_path / "none", "/dev/zero", "a\0b"):
        assert images.thumbnail(str(path)) is None


def test_a_thumbnail_follows_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGBA", (3000, 10), "red").save(path)
    first = images.thumbnail(str(path))
    assert first is not None
    assert first.size == (320, 1)
    assert images.thumbnail(str(path)) is first
    Image.new("L", (10, 11), 255).save(path)
    second = images.thumbnail(str(path))
    assert second is not None
    assert second.size == (10, 11)
    assert len(images.half_blocks(second, 8, 3)) == 3
    assert images.half_blocks(first, 8, 3) == [[("▀", "#f00000,#f00000")] * 8]
