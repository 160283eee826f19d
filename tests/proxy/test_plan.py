"""The planner alone: bytes in, slices out."""

import base64
import io
import json
import struct
import tracemalloc
from typing import Any

import pytest
from PIL import Image

from eccon_proxy.errors import Failure
from eccon_proxy.imagesize import pixels
from eccon_proxy.plan import Plan, content_uuid, encoder_body, fingerprint, parse, pd_body

ALL = frozenset({"image_url", "input_image", "audio_url", "input_audio", "video_url", "image_embeds"})
IMAGE = '{"type":"image_url","image_url":{"url":"http://x/1"}}'


def chat(*parts: str, more: str = "") -> bytes:
    """A request whose content is these parts, written as they are."""
    return f'{{"model":"m","messages":[{{"role":"user","content":[{",".join(parts)}]}}]{more}}}'.encode()


def forwarded(plan: Plan) -> bytes:
    """What the PD gets, with uuids U0, U1 and so on."""
    return b"".join(pd_body(plan, [b"U%d" % i for i in range(len(plan.items))]))


def encoded(plan: Plan) -> list[Any]:
    """What encoders get."""
    return [json.loads(b"".join(encoder_body(plan, item, b"U%d" % i))) for i, item in enumerate(plan.items)]


def refused(body: bytes, kinds: frozenset[str] = ALL) -> str:
    """The message of a refusal."""
    with pytest.raises(Failure) as caught:
        parse(body, kinds=kinds)
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (IMAGE, IMAGE[:-1] + ',"uuid":"U0"}'),
        (IMAGE[:-1] + " }", IMAGE[:-1] + ' ,"uuid":"U0"}'),
        ('{"uuid":"a",' + IMAGE[1:], IMAGE[:-1] + ',"uuid":"U0"}'),
        (IMAGE[:-1] + ',"uuid":"a"}', IMAGE[:-1] + ',"uuid":"U0"}'),
        (IMAGE[:-1] + ',"uuid":null,"uuid":"b"}', IMAGE[:-1] + ',"uuid":"U0"}'),
        (IMAGE[:-1] + ',"\\u0075uid":"a", "k":1.0}', IMAGE[:-1] + ', "k":1.0,"uuid":"U0"}'),
        ('{"image_url":"http://x"}', '{"image_url":"http://x","uuid":"U0"}'),
        (
            '{"type":"image_url","image_url":{"url":"a","uuid":"inner"}}',
            '{"type":"image_url","image_url":{"url":"a","uuid":"inner"},"uuid":"U0"}',
        ),
    ],
)
def test_only_the_uuid_of_a_part_changes(part: str, expected: str) -> None:
    more = ',"seed":12345678901234567890123,"temperature":1.0,"x":{"b":1e2}'
    plan = parse(chat('"hi"', part, more=more), kinds=ALL)
    assert forwarded(plan) == chat('"hi"', expected, more=more)


def test_a_client_uuid_with_bytes_beyond_ascii_is_cut_out_exactly() -> None:
    part = '{"x":"안녕🙂","uuid":"한","type":"image_url","image_url":{"url":"data:,é"}}'
    plan = parse(chat(part), kinds=ALL)
    assert (
        forwarded(plan).decode()
        == chat('{"x":"안녕🙂","type":"image_url","image_url":{"url":"data:,é"},"uuid":"U0"}').decode()
    )
    assert plan.items[0].client_uuid == "한"


def test_the_last_of_doubled_messages_is_the_one_that_is_edited() -> None:
    once = f'"messages":[{{"role":"user","content":[{IMAGE}]}}]'
    body = f"{{{once},{once}}}".encode()
    plan = parse(body, kinds=ALL)
    out = forwarded(plan)
    assert out.index(b'"uuid"') > len(body) // 2
    assert json.loads(out)["messages"][0]["content"][0]["uuid"] == "U0"


def test_what_a_later_key_overrules_may_have_any_type() -> None:
    body = f'{{"messages":1,"messages":[{{"content":7,"role":"user","content":[{IMAGE}]}}]}}'.encode()
    plan = parse(body, kinds=ALL)
    assert json.loads(forwarded(plan))["messages"][0]["content"][0]["uuid"] == "U0"


def test_identical_parts_are_one_item_and_another_detail_is_not() -> None:
    other = '{"type":"image_url","image_url":{"url":"http://x/1","detail":"high"}}'
    plan = parse(chat(IMAGE, other, IMAGE, IMAGE[:-1] + ',"uuid":"mine"}'), kinds=ALL)
    assert [item.index for item in plan.items] == [0, 1]
    assert [position for _, position in plan.places] == [0, 1, 0, 0]


def test_equal_tails_are_not_taken_for_equal_images() -> None:
    def long(first: str) -> str:
        return f'{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{first}{"A" * 4000}"}}}}'

    assert len(parse(chat(long("B"), long("C"), long("B")), kinds=ALL).items) == 2


def test_a_bom_is_kept() -> None:
    plan = parse(b"\xef\xbb\xbf" + chat(IMAGE), kinds=ALL)
    assert forwarded(plan).startswith(b"\xef\xbb\xbf{")
    assert b'"uuid":"U0"' in forwarded(plan)


def test_a_bytearray_is_as_good() -> None:
    plan = parse(bytearray(chat(IMAGE, IMAGE.replace("1", "2"))), kinds=ALL)
    assert [p["uuid"] for p in json.loads(forwarded(plan))["messages"][0]["content"]] == ["U0", "U1"]


def test_without_media_the_body_is_the_clients_own_object() -> None:
    body = chat('{"type":"text","text":"x","image_url":null}', '{"type":"hologram_url","a":1}', "1")
    plan = parse(body, kinds=ALL)
    assert not plan.items
    assert pd_body(plan, []) == [body]


def test_an_encoder_gets_what_changes_the_hash_and_nothing_else() -> None:
    more = (
        ',"mm_processor_kwargs":{"max_pixels":200704.0},"media_io_kwargs":{},"priority":3,"stream":true,'
        '"stream_options":{},"n":2,"tools":[],"tool_choice":"none","response_format":{},"logprobs":true,'
        '"min_tokens":4,"max_tokens":50'
    )
    (request,) = encoded(parse(chat(IMAGE, more=more), kinds=ALL))
    part = {**json.loads(IMAGE), "uuid": "U0"}
    assert request == {
        "model": "m",
        "mm_processor_kwargs": {"max_pixels": 200704.0},
        "media_io_kwargs": {},
        "priority": 3,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": [part]}],
    }


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ('{"type":"image_url","image_url":{"url":"a"},"video_url":{"url":"b"}}', "several"),
        ('{"image_url":"a","audio_url":"b"}', "several"),
        ('{"type":"text","text":"x","image_url":{"url":"a"}}', "must not carry"),
        ('{"type":"hologram","image_url":"a"}', "must not carry"),
        ('{"type":["image_url"],"image_url":"a"}', "not a string"),
        ('{"type":"video_url","image_url":{"url":"a"}}', "image_url in a part of type video_url"),
        ('{"type":"image_url","uuid":"a"}', "without data"),
        ('{"type":"image_url","image_url":null,"uuid":"a"}', "without data"),
        ('{"type":"image_url","image_url":{"url":""},"uuid":"a"}', "without data"),
        ('{"type":"image_url","image_url":{ "url" : null }}', "without data"),
        ('{"type":"input_audio","input_audio":{"data":"","format":"wav"}}', "without data"),
        ('{"type":"image_embeds","image_embeds":{}}', "without data"),
        ('{"uuid":"a"}', "names no media"),
        ('{"image_pil":"a"}', "image_pil"),
        ('{"type":"image_pil","image_pil":null}', "image_pil"),
        ('{"type":"image_pil"}', "image_pil"),
        ('{"type":"video_embeds","video_embeds":"a"}', "not encoded here"),
        ('{"type":"prompt_embeds","prompt_embeds":"a"}', "not encoded here"),
    ],
)
def test_what_cannot_be_read_in_one_way_is_refused(part: str, word: str) -> None:
    message = refused(chat(part))
    assert word in message
    assert "messages[0].content[0]" in message


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[1]", b'"x"', b"null", b"{bad", b'{"messages":"hello"}', b'{"messages":null}',
        b'{"model":"m"}', b'{"messages":[1]}', b'{"messages":[{"content":{"a":1}}]}',
        b'{"messages":[],"t":NaN}',
        b'{"messages":[{"content":"\xff"}]}', '{"messages":[]}'.encode("utf-16-le"),
        b'{"messages":[{"content":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    ],
)  # fmt: skip
def test_nonsense_is_a_400(body: bytes) -> None:
    assert refused(body)


def test_content_identity_follows_content_options_and_the_clients_uuid() -> None:
    def identity(*parts: str, more: str = "") -> bytes:
        plan = parse(chat(*parts, more=more), kinds=ALL, keep_uuid=True)
        return content_uuid(plan, plan.items[-1])

    assert identity(IMAGE) == identity(IMAGE)
    assert identity(IMAGE) == identity('"text before"', IMAGE)
    different = {
        identity(IMAGE),
        identity(IMAGE.replace("1", "2")),
        identity(IMAGE, more=',"mm_processor_kwargs":{"max_pixels":1}'),
        identity(IMAGE[:-1] + ',"uuid":"a"}'),
        identity(IMAGE[:-1] + ',"uuid":"b"}'),
    }
    assert len(different) == 5


def test_fingerprints_tell_bodies_apart() -> None:
    small, large = chat(IMAGE), chat(IMAGE, json.dumps("x" * 100_000))
    assert fingerprint(small) == fingerprint(bytearray(small))
    assert fingerprint(large) == fingerprint(bytes(large))
    assert fingerprint(small) != fingerprint(large)
    assert fingerprint(large) != fingerprint(large.replace(b"http://x/1", b"http://x/2"))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
@pytest.mark.parametrize("extra", [{}, {"lossless": True}, {"exif": b"Exif\0\0" + b"x" * 5000}])
@pytest.mark.parametrize("slash", ["/", "\\/"])
def test_pixels_are_read_from_the_header(form: str, extra: dict[str, Any], slash: str) -> None:
    file = io.BytesIO()
    Image.effect_noise((457, 123), 50).convert("RGB").save(file, form, **extra)
    data = base64.b64encode(file.getvalue()).decode().replace("/", slash)
    part = f'{{"type":"image_url","image_url":{{"url":"data:image/x;base64,{data}"}}}}'
    plan = parse(chat(part), kinds=ALL)
    assert pixels(plan, plan.items[0]) == 457 * 123


@pytest.mark.parametrize(
    "data", ["http://x/1", "data:image/png;base64,", "data:image/png;base64,!!", "data:,x"]
)
def test_unknown_sizes_are_none(data: str) -> None:
    plan = parse(chat(f'{{"type":"image_url","image_url":{{"url":"{data}"}}}}'), kinds=ALL)
    assert pixels(plan, plan.items[0]) is None


@pytest.mark.parametrize("size", [(0, 5), (2**32 - 1, 2**32 - 1), (20_000, 20_000)])
def test_a_size_that_is_nonsense_is_none(size: tuple[int, int]) -> None:
    # It would count for all images of unknown size, for long.
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", *size) + bytes(20)
    url = "data:image/png;base64," + base64.b64encode(head).decode()
    plan = parse(chat(f'{{"image_url":"{url}"}}'), kinds=ALL)
    assert pixels(plan, plan.items[0]) is None


NUMBER = "1" * 5000
"""Python makes no int of so many digits."""


@pytest.mark.parametrize(
    "part",
    [
        f'{{"type":"image_url","image_url":{{"url":"a"}},"n":{NUMBER},"uuid":"u"}}',
        f'{{"type":"image_url","image_url":{NUMBER}}}',
        f'{{"type":"image_url","image_url":-{NUMBER}}}',
        f'{{"type":"image_url","image_url":{{"url":{NUMBER}}},"uuid":"u"}}',
    ],
)
def test_numbers_of_any_length_are_only_passed_on(part: str) -> None:
    plan = parse(chat(part), kinds=ALL)
    assert len(plan.items) == 1
    assert NUMBER.encode() in forwarded(plan)
    assert b'"uuid":"U0"' in forwarded(plan)


def test_a_uuid_that_is_a_long_number_is_refused() -> None:
    assert "not a string" in refused(chat(f'{{"image_url":"a","uuid":{NUMBER}}}'))


def test_a_crowd_of_items_is_refused_when_the_last_that_fits_is_passed() -> None:
    parts = [IMAGE.replace("/1", f"/{n}") for n in range(9)]
    assert len(parse(chat(*parts[:8], *parts[:8]), kinds=ALL, most=8).items) == 8
    with pytest.raises(Failure, match="more than 8 different media items"):
        parse(chat(*parts), kinds=ALL, most=8)


def test_parts_without_number_are_refused_before_each_is_looked_at() -> None:
    assert "content parts" in refused(chat(*['"x"'] * 10_001))


@pytest.mark.parametrize("split", range(1, 4))
def test_utf_8_is_checked_across_the_borders_of_what_is_checked_at_a_time(split: int) -> None:
    step = 256 * 1024
    head = b'{"messages":[{"content":["'
    whole = head + b"x" * (step - len(head) - split) + "🙂".encode() + b'"]}]}'
    assert not parse(whole, kinds=ALL).items
    for bad in (whole.replace("🙂".encode(), "🙂".encode()[:3]), whole[:-6] + b"\xf0\x9f"):
        assert "at byte 26214" in refused(bad)


def test_checking_utf_8_takes_little_memory() -> None:
    body = chat('"한🙂"', f'{{"image_url":"{"A" * 30_000_000}"}}')
    tracemalloc.start()
    try:
        parse(body, kinds=ALL)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
