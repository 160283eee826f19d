"""What the fields of the test prompt mean: images, loads."""

from pathlib import Path

import pytest

from eccon.console import images, prompting
from eccon.prompt import PromptError


@pytest.mark.parametrize(
    ("text", "load"),
    [
        ("", (1, 0.0, 1)),
        ("7", (7, 0.0, 1)),
        ("20x4", (20, 0.0, 4)),
        ("1x256", (1, 0.0, 256)),
        ("30sx4", (1, 30.0, 4)),
        ("30s x 4", (1, 30.0, 4)),
        ("2m", (1, 120.0, 1)),
    ],
)
def test_a_load(text: str, load: tuple[int, float, int]) -> None:
    assert prompting.load_of(text) == load
    times, seconds, width = load
    draft = prompting.Draft("m", "t", "", repeat=times, seconds=seconds, at_once=width)
    assert prompting.load_of(prompting.load_text(draft)) == load


@pytest.mark.parametrize(
    "text", ["x", "0", "3x0", "3x257", "-1", "1.5", "10001", "61m", "4x4x4", "1h", "9" * 40]
)
def test_no_load(text: str) -> None:
    with pytest.raises(PromptError, match="load"):
        prompting.load_of(text)


def test_images_by_pattern_directory_and_dropped_file(tmp_path: Path) -> None:
    for name in ("b one.png", "a.png", "c.webp", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    a, b, c = (str(tmp_path / name) for name in ("a.png", "b one.png", "c.webp"))
    assert images.expand(str(tmp_path)) == [a, b, c]
    assert images.expand(f"{tmp_path}/*.png") == [a, b]
    assert images.expand(f"'{b}' file://{tmp_path}/b%20one.png") == [b, b]
    assert images.expand("https://x/y.png?a=* data:image/png;base64,AA==") == [
        "https://x/y.png?a=*",
        "data:image/png;base64,AA==",
    ]
    assert images.files(f"'{b}' https://x/y.png {tmp_path}/*.png 'cut") == []
    assert images.files(f"'{b}' https://x/y.png {tmp_path}/*.png") == [b, a, b]
    with pytest.raises(PromptError, match="no image there"):
        images.expand(f"{tmp_path}/*.gif")


def test_a_file_whose_name_looks_like_a_pattern_is_itself(tmp_path: Path) -> None:
    odd = tmp_path / "a[1].png"
    odd.write_bytes(b"")
    assert images.expand(f"'{odd}'") == [str(odd)]
