"""What the fields of the test prompt mean: images, loads; and what is copied of it."""

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eccon.console import images, paths, prompting
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


def test_files_by_url_with_and_without_a_host(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/a%20b.png", f"file://localhost{tmp_path}/a%20b.png"):
        assert images.expand(url) == [f"{tmp_path}/a b.png"]


def test_a_word_is_completed_as_it_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some dir").mkdir()
    for name in ("some dir/x$1.png", "some.txt", "son's.png", "Über.jpg", ".hidden.png"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text, completed in {
        "som": "some\\ dir/",
        "one two ~/som": "one two ~/some\\ dir/",
        "some\\ dir/": "some\\ dir/x\\$1.png",
        "'some dir/": "'some dir/x$1.png'",
        '"some ': '"some dir/',
        '"some dir/': '"some dir/x$1.png"',
        "son": "son\\'s.png",
        "'son": None,
        "./Ü": "./Über.jpg",
        ".hid": ".hidden.png",
        "some.": None,
        "samples": None,
        "a ": None,
        "": None,
        "end\\": None,
        "/none/": None,
        "https://x/som": None,
    }.items():
        assert paths.complete(text) == completed, text
    found = paths.complete('x.png "some dir/')
    assert found is not None
    assert images.expand(found) == ["x.png", "some dir/x$1.png"]


def test_dropped_files_are_words(tmp_path: Path) -> None:
    a, b = tmp_path / "a b.png", tmp_path / "it's.png"
    for path in (a, b):
        path.write_bytes(b"")
    both = [str(a), str(b)]
    for text in (
        f"{a}\n{b}\n",
        f"{a}\r\n{b}",
        f"{shlex.quote(str(a))} {shlex.quote(str(b))} ",
        f"{tmp_path}/a\\ b.png {tmp_path}/it\\'s.png",
        f"file://{tmp_path}/a%20b.png\r\nfile://{tmp_path}/it%27s.png\r\n",
    ):
        assert images.expand(paths.pasted(text)) == both, text
        assert paths.is_drop(text)
    assert not paths.is_drop("es.png")
    assert paths.pasted("x" * 5000) == "x" * 5000


class Chat(BaseHTTPRequestHandler):
    """Writes down bodies, and answers as a chat API does."""

    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        choice = {"index": 0, "finish_reason": "stop"}
        said: dict[str, Any] = {"id": "1", "created": 1, "model": body["model"]}
        if body["stream"]:
            said |= {
                "object": "chat.completion.chunk",
                "choices": [choice | {"delta": {"content": "hi there"}}],
            }
            data = f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n".encode()
        else:
            message = {"role": "assistant", "content": "hi there"}
            said |= {"object": "chat.completion", "choices": [choice | {"message": message}]}
            data = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if body["stream"] else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        pass


@pytest.fixture
def chat() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    handler = type("Handler", (Chat,), {"bodies": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler.bodies  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_copied_sends_the_same_request(
    chat: tuple[str, list[dict[str, Any]]], tmp_path: Path, stream: bool
) -> None:
    url, bodies = chat
    big = tmp_path / "big one.png"
    big.write_bytes(bytes(200_000))  # more than one argument of a command may be
    extra = '{"top_k": 3, "temperature": 0, "mm_processor_kwargs": {"max_pixels": 50176}}'
    draft = prompting.Draft("m", "what's this?\nEND_OF_BODY", f"'{big}'", stream=stream, extra=extra)
    wanted = json.loads(prompting.build(draft))
    shell = subprocess.run(["bash"], input=prompting.as_curl(draft, url), capture_output=True, text=True)
    assert "hi there" in shell.stdout, shell.stderr
    script = prompting.as_python(draft, url)
    python = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True)
    assert python.stdout == "hi there\n", python.stderr
    assert bodies == [wanted, wanted]
