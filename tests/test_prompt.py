"""Test prompts: what is built, and that an answer is read however its bytes are cut."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from eccon import prompt
from eccon.model import Span, Trace

SSE = (
    'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    ": keep-alive\r\n\r\n"
    'data: {"choices":[{"delta":{"content":"안녕🙂"},"finish_reason":null}]}\r\n\r\n'
    'data: {"choices":[{"delta":{"content":"!"},"finish_reason":"stop"}]}\n\n'
    'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
    "data: [DONE]\n\n"
).encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_a_stream_is_read_however_it_is_cut(size: int) -> None:
    reader = prompt.StreamReader()
    got = "".join(reader.feed(SSE[i : i + size]) for i in range(0, len(SSE), size)) + reader.close()
    assert got == reader.text == "안녕🙂!"
    assert reader.finished
    assert reader.usage == {"completion_tokens": 2}
    assert reader.error is None


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_a_plain_answer_is_read_at_its_end(size: int) -> None:
    body = json.dumps(
        {"choices": [{"message": {"content": "two\nlines"}, "finish_reason": "stop"}], "usage": {}}, indent=1
    ).encode()
    reader = prompt.StreamReader()
    got = "".join(reader.feed(body[i : i + size]) for i in range(0, len(body), size)) + reader.close()
    assert got == "two\nlines"
    assert reader.finished


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"error":{"message":"bad image","code":400}}', "bad image"),
        (b'{"error":"Unauthorized"}', "Unauthorized"),
        (b'data: {"error":{"message":"engine dead"}}\n\ndata: [DONE]\n\n', "engine dead"),
        (b"<html>", "not JSON"),
    ],
)
def test_an_error_is_an_error_in_any_shape(body: bytes, error: str) -> None:
    reader = prompt.StreamReader()
    reader.feed(body)
    reader.close()
    assert reader.error is not None
    assert error in reader.error
    assert not reader.finished


def test_a_stream_that_breaks_off_is_not_finished() -> None:
    reader = prompt.StreamReader()
    reader.feed(SSE[: SSE.index(b"!")])
    reader.close()
    assert not reader.finished


def test_images_come_first_and_paths_become_data_urls(tmp_path: Path) -> None:
    (tmp_path / "a.PNG").write_bytes(b"\x89PNG")
    body = json.loads(
        prompt.build("m", "hi", [str(tmp_path / "a.PNG"), "http://h/b.jpg"], stream=True, extra={"seed": 1})
    )
    urls = [p["image_url"]["url"] for p in body["messages"][0]["content"][:2]]
    assert urls == ["data:image/png;base64," + base64.b64encode(b"\x89PNG").decode(), "http://h/b.jpg"]
    assert body["messages"][0]["content"][2] == {"type": "text", "text": "hi"}
    assert (body["stream"], body["seed"]) == (True, 1)


@pytest.mark.parametrize("name", ["missing.png", "notes.txt"])
def test_what_is_no_image_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(prompt.PromptError, match=name):
        prompt.build("m", "hi", [str(tmp_path / name)])


def test_eight_samples_of_several_formats_come_along() -> None:
    found = prompt.samples()
    assert len(found) == 8
    assert len({p.suffix for p in found}) > 1


def test_webp_is_an_image_where_the_system_knows_no_types(tmp_path: Path) -> None:
    (tmp_path / "a.webp").write_bytes(b"RIFF")
    program = (
        "import mimetypes, sys; mimetypes.init(files=[]); from eccon import prompt;"
        "print(len(prompt.samples()), prompt.image_url(sys.argv[1])[:16])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.webp")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["8", "data:image/webp;"]


def test_an_image_is_reported_by_the_attempt_that_succeeded() -> None:
    trace = Trace(
        id="t",
        started_at=0,
        spans=(
            Span(kind="encode", start=0, end=1, item=0, encoder="encoder-0", uuid="a", outcome="timeout"),
            Span(kind="encode", start=1, end=1.5, item=0, attempt=1, encoder="encoder-1", uuid="b"),
            Span(kind="encode", start=0, end=0.25, item=1, encoder="encoder-2", uuid="c"),
            Span(kind="push", start=1.5, end=1.501, item=0, uuid="b"),
            Span(kind="wait", start=1.501, end=1.6, item=0, uuid="b"),
            Span(kind="pull", start=1.6, end=1.603, item=0, uuid="b"),
        ),
    )
    first, second = prompt.image_reports(trace)
    assert (first.encoder, first.encode_ms, first.attempts) == ("encoder-1", 500, 2)
    assert first.transfer_ms == pytest.approx(4)
    assert (second.encoder, second.transfer_ms) == ("encoder-2", None)
    assert prompt.image_lines(trace)[0].startswith("image 1  encoder-1")
