"""The signs of a guarded connector, read from bytes."""

import json
from typing import Any

import pytest

from eccon_proxy.guard import Head, is_lost_answer, outcome, placeholder

ROLE = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    b'"prompt_token_ids":null,"prompt_text":null}\n\n'
)
DONE = b"data: [DONE]\n\n"


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"ec_guard": {"a": "delivered"}}, "delivered"),
        ({"ec_guard": {"a": "delivered", "b": "delivered"}}, "delivered"),
        ({"ec_guard": {"a": "delivered", "b": "pushed"}}, "pushed"),
        ({"ec_guard": {"a": "refused"}}, "refused"),
        ({"ec_guard": {}}, "unknown"),
        ({"ec_guard": None}, None),
        ({"ec_guard": "delivered"}, None),
        ({"other": 1}, None),
        (None, None),
    ],
)
def test_an_encoders_word(params: object, word: str | None) -> None:
    body = json.dumps({"choices": [{}], "ec_transfer_params": params}).encode()
    assert outcome(body) == word


def test_no_json_is_no_word() -> None:
    assert outcome(b'"ec_guard" {') is None


@pytest.mark.parametrize(
    ("status", "error", "lost"),
    [
        (500, {"message": "Internal server error", "type": "InternalServerError", "code": 500}, True),
        (500, {"message": "EngineCore encountered an issue.", "type": "InternalServerError"}, False),
        (503, {"message": "Internal server error", "type": "InternalServerError"}, False),
        (500, "Unauthorized", False),
        (500, None, False),
    ],
)
def test_a_pds_500(status: int, error: object, lost: bool) -> None:
    body = json.dumps({"error": error}).encode()
    assert is_lost_answer(status, body) is lost


def test_a_placeholder_is_told_in_the_body() -> None:
    body = json.dumps({"choices": [{}], "ec_transfer_params": {"ec_guard": {"h": "placeholder"}}}).encode()
    assert placeholder(body)
    assert not placeholder(body.replace(b'"ec_guard"', b'"x"'))


@pytest.mark.parametrize(
    ("stream", "verdict"),
    [
        (ROLE, "hold"),
        (ROLE + ROLE, "hold"),
        (b": ping\n\n" + ROLE, "hold"),
        (ROLE + DONE, "lost"),
        (DONE, "lost"),
        (ROLE + b": ping\r\n\r\n" + DONE, "lost"),
        (ROLE + chunk({"content": "x"}), "release"),
        (ROLE + chunk({}, "stop") + DONE, "release"),
        (ROLE + chunk({"content": ""}, "length"), "release"),
        (ROLE + chunk({"tool_calls": [{"index": 0}]}), "release"),
        (ROLE + chunk({"reasoning": "hm"}), "release"),
        (ROLE + chunk({"content": None, "tool_calls": []}), "hold"),
        (b'data: {"error":{"message":"x"}}\n\n' + DONE, "release"),
        (b'data: {"choices":[],"usage":{}}\n\n', "release"),
        (b"event: x\ndata: 1\n\n", "release"),
        (b"data: not json\n\n", "release"),
        (b"x" * 70_000, "release"),
        (b"", "hold"),
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_the_head_of_a_stream(stream: bytes, verdict: str, piece: int) -> None:
    head = Head()
    said = "hold"
    for at in range(0, len(stream), piece):
        said = head.feed(stream[at : at + piece])
        if said != "hold":
            break
    assert said == verdict
    assert stream.startswith(bytes(head.held))
