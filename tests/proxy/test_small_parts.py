"""Small pure pieces: ids, headers, stream taps, URLs, settings, exports."""

import json
import socket
from typing import Any

import pytest

from eccon_proxy.chrometrace import chrome_trace
from eccon_proxy.headers import answer_headers, request_headers
from eccon_proxy.metrics import Metrics
from eccon_proxy.requestid import derived, new_id, usable
from eccon_proxy.schema import Span, Trace
from eccon_proxy.settings import SettingsError, from_mapping, groups, listens_at, masked, normal_url
from eccon_proxy.sse import StreamTap
from eccon_proxy.vitals import encoded, first_model, read_vitals

GIVEN = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_derived_ids_are_short_and_apart() -> None:
    assert derived("abc", "0.1") == b"abc-0.1"
    long = ["x" * 127 + end for end in "ab"]
    found = {derived(parent, f"{i}.1") for parent in long for i in range(30)}
    assert len(found) == 60
    assert max(map(len, found)) <= 128
    assert all(usable(one) for one in found)
    assert new_id() != new_id()


@pytest.mark.parametrize("bad", [b"", b"a b", b"a\tb", "é".encode(), b"x" * 129, b"a\x7f"])
def test_unusable_ids(bad: bytes) -> None:
    assert not usable(bad)


def test_request_headers_pass_end_to_end_ones_only() -> None:
    lines = request_headers(
        [
            (b"host", b"a"), (b"content-length", b"3"), (b"connection", b"close, X-Hop"), (b"x-hop", b"1"),
            (b"te", b"trailers"), (b"x-custom", b"1"), (b"accept-encoding", b"gzip"), (b"traceparent", GIVEN),
            (b"tracestate", b"a=b"), (b"tracestate", b"c=d"),
        ],
        b"authorization: Bearer k\r\n",
    )  # fmt: skip
    assert lines.split(b"\r\n") == [
        b"authorization: Bearer k", b"x-custom: 1", b"traceparent: " + GIVEN, b"tracestate: a=b,c=d", b"",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "bad", [GIVEN + b"-x", b"ff" + GIVEN[2:], GIVEN.upper(), GIVEN.replace(b"4bf9", b"4bg9")]
)
def test_invalid_trace_contexts_are_dropped(bad: bytes) -> None:
    assert request_headers([(b"traceparent", bad), (b"tracestate", b"a=b")], b"") == b""
    assert request_headers([(b"traceparent", b"01" + GIVEN[2:] + b"-x")], b"")
    assert request_headers([(b"traceparent", GIVEN), (b"traceparent", GIVEN)], b"") == b"", "whose is it?"


def test_answer_headers() -> None:
    headers, stream = answer_headers(
        [
            (b"content-type", b"text/event-stream; charset=utf-8"), (b"set-cookie", b"a"), (b"server", b"x"),
            (b"date", b"d"), (b"cache-control", b"max-age=9"), (b"retry-after", b"7"),
            (b"transfer-encoding", b"chunked"), (b"x-request-id", b"theirs"), (b"x-ratelimit-limit", b"3"),
        ],
        b"ours",
    )  # fmt: skip
    assert stream
    assert headers == [
        (b"content-type", b"text/event-stream; charset=utf-8"), (b"retry-after", b"7"),
        (b"x-ratelimit-limit", b"3"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"),
        (b"x-request-id", b"ours"),
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [1, 5, 7, 20, 1000])
def test_an_error_event_is_seen_however_it_is_cut(cut: int) -> None:
    stream = b': ping\r\n\r\ndata: {"choices":[{"delta":{"content":"\\n\\ndata: {\\"error\\""}}]}\n\n'
    error = b'data: {"error":{"message":"engine died"}}\n\ndata: [DONE]\n\n'
    for data, seen in ((stream * 3, ""), (stream * 3 + error, "engine died")):
        tap = StreamTap()
        for at in range(0, len(data), cut):
            tap.feed(data[at : at + cut])
        assert (seen in tap.error) if seen else not tap.error


def test_usage_of_a_stream() -> None:
    tap = StreamTap()
    tap.feed(b'data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3}}\n\ndata: [DONE]\n\n')
    assert tap.usage() == {b"prompt": 12, b"completion": 3}


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("http://localhost:19101/", "http://127.0.0.1:19101"),
        ("HTTP://Example.ORG", "http://example.org:80"),
        ("https://a.b/x/", "https://a.b:443/x"),
        ("http://[::1]:80", "http://[::1]:80"),
        (" http://127.0.0.1:1 ", "http://127.0.0.1:1"),
        ("http://0.0.0.0:1", "http://127.0.0.1:1"),
        ("http://[::]:1", "http://[::1]:1"),
        ("http://127.1:1", "http://127.0.0.1:1"),
        ("http://2130706433:1", "http://127.0.0.1:1"),
        ("http://[::ffff:10.0.0.7]:1", "http://10.0.0.7:1"),
        ("http://3com:1", "http://3com:1"),
        ("http://gpu_1:1", "http://gpu_1:1"),
    ],
)
def test_urls_have_one_form(text: str, normal: str) -> None:
    assert normal_url(text) == normal


@pytest.mark.parametrize(
    "text",
    [
        "", "127.0.0.1:1", "ftp://a", "http://", "http://a:99999", "http://a:0", "http://u@a", "http://a b",
        "http://[::1", "http://[x]:1", "http://h\u00f6st:1", "http://a:1/p q", "http://a:1/\ud55c", "http://a:1/\0",
    ],
)  # fmt: skip
def test_what_is_no_url(text: str) -> None:
    with pytest.raises(SettingsError):
        normal_url(text)


@pytest.mark.parametrize(
    ("host", "url", "own"),
    [
        ("127.0.0.1", "http://127.0.0.1:5", True),
        ("127.0.0.1", "https://127.0.0.1:5", True),
        ("127.0.0.1", "http://127.0.0.1:6", False),
        ("127.0.0.1", "http://127.0.0.2:5", False),
        ("0.0.0.0", "http://127.0.0.2:5", True),
        ("0.0.0.0", f"http://{socket.gethostname().lower()}:5", True),
        ("::", "http://[::1]:5", True),
        ("localhost", "http://127.0.0.1:5", True),
        ("0.0.0.0", "http://198.51.100.7:5", False),
        ("encoder-host", "http://encoder-host:5", True),
        ("10.0.0.1", "http://encoder-host:5", False),
    ],
)
def test_who_is_meant_by_a_url(host: str, url: str, own: bool) -> None:
    assert listens_at(host, 5, url) is own


def test_groups_must_be_whole() -> None:
    two = {
        "decode_servers_urls": ["http://p:1", "http://p:2"],
        "encode_servers_urls": ["http://e:1", "http://e:2"],
    }
    found = groups(from_mapping({**two, "groups": ["http://p:2=http://e:1", "http://p:1=http://e:2"]}))
    assert [(g.pd, g.encoders) for g in found] == [
        ("http://p:1", ("http://e:2",)),
        ("http://p:2", ("http://e:1",)),
    ]
    bad: list[list[str]] = [
        [], ["http://p:1=http://e:1,http://e:2"], ["http://p:1=http://e:1", "http://p:2=http://e:1"],
        ["http://p:1=http://e:1", "http://p:3=http://e:2"], ["nonsense"],
    ]  # fmt: skip
    for one in bad:
        with pytest.raises(SettingsError, match="group"):
            from_mapping({**two, "groups": one})


def test_secrets_are_masked() -> None:
    values: dict[str, Any] = {
        "decode_servers_urls": ["http://p:1"], "api_keys": ["k1", "k2"], "upstream_api_key": "k3",
        "admin_key": "k4",
    }  # fmt: skip
    shown = json.dumps(masked(from_mapping(values)))
    assert not any(f"k{i}" in shown for i in range(1, 5))
    assert '["***", "***"]' in shown


def test_vitals() -> None:
    text = (
        b"# HELP x y\nprocess_start_time_seconds 1.7e+09\n"
        b'vllm:generation_tokens_total{model_name="m"} 5.0\nvllm:num_requests_running{model_name="m"} 1.0\n'
    )
    assert read_vitals(text).epoch == 1.7e9
    assert len(read_vitals(text).counters) == 2
    assert read_vitals(text) != read_vitals(text.replace(b"5.0", b"6.0"))
    assert read_vitals(b"").epoch is None
    assert first_model(b'{"data":[{"id":"m"}]}') == "m"
    assert first_model(b'{"data":[]}') is first_model(b"<html>") is None


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"choices":[]}', b'{"choices":null}', b'{"choices":[1}']
)
def test_what_is_no_encoded_item(body: bytes) -> None:
    assert not encoded(body)
    assert encoded(b'{"choices":[{}]}')


def test_labels_are_quoted_and_members_are_forgotten() -> None:
    metrics = Metrics()
    metrics.retries.add("encoder", 'a"b\\c\nd')
    metrics.ejections.add("encoder-0")
    metrics.encode_seconds.observe(0.2, "encoder-0")
    text = metrics.render().decode()
    assert 'reason="a\\"b\\\\c\\nd"' in text
    assert 'eccon_proxy_encode_seconds_bucket{encoder="encoder-0",le="0.25"} 1' in text
    metrics.forget("encoder-0")
    assert "encoder-0" not in metrics.render().decode()


def test_a_trace_as_chrome_trace() -> None:
    spans = (
        Span(kind="encode", start=0.1, end=0.3, item=1, attempt=1, encoder="encoder-0", uuid="u"),
        Span(kind="pd", start=0.3),
    )
    trace = Trace(id="a", started_at=1000.0, spans=spans, total_s=1.0, status=200)
    events = chrome_trace([trace])["traceEvents"]
    assert [e["name"] for e in events] == [
        "process_name",
        "/v1/chat/completions 200",
        "encode encoder-0",
        "pd",
    ]
    assert (events[2]["ts"], events[2]["dur"], events[2]["tid"]) == (1000_100_000, 200_000, 3)
    assert events[3]["dur"] == 700_000


@pytest.mark.parametrize("size", [1, 7, 60, 10_000])
def test_usage_is_found_however_the_stream_is_cut(size: int) -> None:
    whole = (
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":7}}\n\n'
        b"data: [DONE]\n\n"
    )
    tap = StreamTap()
    for i in range(0, len(whole), size):
        tap.feed(whole[i : i + size])
    assert tap.usage() == {b"prompt": 11, b"completion": 7}


def test_usage_is_found_when_each_event_is_a_read() -> None:
    tap = StreamTap()
    for piece in (b'data: {"usage":{"prompt_tokens":11,"completion_tokens":7}}\n\n', b"data: [DONE]\n\n"):
        tap.feed(piece)
    assert tap.usage() == {b"prompt": 11, b"completion": 7}
