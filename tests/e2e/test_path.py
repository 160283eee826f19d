"""From the command line through proxy, encoders, connector and PD, and back."""

import re
import signal
import subprocess
from collections.abc import Iterator

import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionContentPartImageParam, ChatCompletionMessageParam

from eccon import prompt
from tests.e2e.cluster import Cluster, assert_names_the_samples, samples, until

SAMPLES = [arg for path in samples() for arg in ("-i", str(path))]
IMAGE_LINE = re.compile(r"image (\d)  (encoder-\d) +encode +([\d.]+) ms  transfer +([\d.]+) ms")


def test_everything_is_ready_after_up(running: Cluster) -> None:
    state = running.state()
    assert [p["name"] for p in state["processes"]] == ["pd", "proxy", *(f"encoder-{i}" for i in range(4))]
    assert {p["state"] for p in state["processes"]} == {"ready"}
    assert state["cluster"]["health"] == "ok"
    assert len({p["pid"] for p in state["processes"]}) == 6
    assert all(psutil.pid_exists(p["pid"]) for p in state["processes"])


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_eight_images_arrive_in_order_over_all_encoders(running: Cluster, stream: str) -> None:
    done = running.eccon("send", stream, *SAMPLES)
    assert_names_the_samples(done.stdout)
    rows = IMAGE_LINE.findall(done.stderr)
    assert [int(r[0]) for r in rows] == [*range(1, 9)]
    assert {r[1] for r in rows} == {f"encoder-{i}" for i in range(4)}
    assert all(float(r[2]) > 0 and float(r[3]) > 0 for r in rows)


def test_the_way_of_a_request_is_kept(running: Cluster) -> None:
    running.eccon("send", *SAMPLES)
    newest = running.eccon("traces", "-n", "1").stdout.split()[0]
    way = running.eccon("traces", newest).stdout
    for kind, count in (
        ("encode", 8),
        ("push", 8),
        ("wait", 8),
        ("pull", 8),
        ("gate", 1),
        ("pd", 1),
        ("stream", 1),
    ):
        assert len(re.findall(rf"^  {kind} ", way, re.MULTILINE)) == count, way


def test_fan_out_and_transfer_are_counted_per_encoder(running: Cluster) -> None:
    before = {p["name"]: p["encoder"]["items"] for p in running.state()["processes"] if p.get("encoder")}
    running.eccon("send", *SAMPLES)
    after = [p for p in running.state()["processes"] if p.get("encoder")]
    assert {p["encoder"]["items"] - before[p["name"]] for p in after} == {2}
    assert all(p["transfer"]["total"]["count"] >= 2 for p in after)
    assert all(p["encoder"]["inflight"] == 0 for p in after)


def image_part(url: str) -> ChatCompletionContentPartImageParam:
    return {"type": "image_url", "image_url": {"url": url}}


def question(*urls: str) -> list[ChatCompletionMessageParam]:
    return [
        {
            "role": "user",
            "content": [
                *map(image_part, urls),
                {"type": "text", "text": "Briefly describe each of these images."},
            ],
        }
    ]


@pytest.fixture
def client(running: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.public_url}/v1", api_key="none", max_retries=0) as c:
        yield c


def data_urls() -> list[str]:
    return [prompt.image_url(str(path)) for path in samples()]


def test_the_stock_openai_client_is_served(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=question(*data_urls()), max_tokens=256)
    assert_names_the_samples(answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_the_stock_openai_client_gets_a_stream(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    chunks = client.chat.completions.create(
        model=model, messages=question(*data_urls()), max_tokens=256, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert_names_the_samples(text)


def test_the_stock_openai_client_sees_whose_fault_it_is(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match=r"image"):
        client.chat.completions.create(model=model, messages=question("data:image/png;base64,bm9wZQ=="))


def test_a_restarted_encoder_has_another_pid_and_works(running: Cluster) -> None:
    before = running.process("encoder-1")
    running.eccon("restart", "encoder-1")
    after = running.process("encoder-1")
    assert after["pid"] != before["pid"]
    assert after["state"] == "ready"
    assert after["restarts"] == before["restarts"] + 1
    assert not psutil.pid_exists(before["pid"])
    assert_names_the_samples(running.eccon("send", *SAMPLES).stdout)
    assert "encoder-1" in running.eccon("send", *SAMPLES).stderr


def test_an_encoder_can_be_added_and_removed_again(running: Cluster) -> None:
    assert running.eccon("add").stdout.strip() == "encoder-4"
    until(lambda: running.process("encoder-4")["encoder"]["state"] == "ready", "the proxy has it")
    done = running.eccon("send", *SAMPLES)
    assert "encoder-4" in {r[1] for r in IMAGE_LINE.findall(done.stderr)}
    running.eccon("remove", "encoder-4")
    assert "encoder-4" not in {p["name"] for p in running.state()["processes"]}
    assert "encoder-4" not in running.eccon("send", *SAMPLES).stderr


def test_scale_and_rolling_restart(running: Cluster) -> None:
    def encoders() -> dict[str, int]:
        return {p["name"]: p["pid"] for p in running.state()["processes"] if p["role"] == "encoder"}

    running.eccon("scale", "2")
    before = encoders()
    assert sorted(before) == ["encoder-0", "encoder-1"]
    running.eccon("restart", "--rolling")
    after = encoders()
    assert sorted(after) == sorted(before)
    assert not set(after.values()) & set(before.values())
    running.eccon("scale", "4")
    assert len(encoders()) == 4
    assert_names_the_samples(running.eccon("send", *SAMPLES).stdout)


def test_logs_are_there_and_can_be_followed(running: Cluster) -> None:
    assert "Application startup complete" in running.eccon("logs", "encoder-0", "-n", "10000").stdout
    command = running.command("logs", "pd", "-n", "1", "-f")
    with subprocess.Popen(command, env=running.env, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert follower.stdout is not None
            assert follower.stdout.readline()
            running.eccon("send", *SAMPLES)
            assert any("pull complete for mm_hash=" in line for line in follower.stdout)
        finally:
            follower.send_signal(signal.SIGINT)


def test_status_to_a_closed_pipe_is_no_traceback(running: Cluster) -> None:
    command = " ".join(running.command("status"))
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -1"], env=running.env, capture_output=True, text=True, timeout=30
    )
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout
    assert done.stdout.startswith("t ")


def test_an_unknown_name_is_refused_by_name(running: Cluster) -> None:
    done = running.eccon("restart", "encoder-77", code=1)
    assert "encoder-77" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_up_changes_nothing(running: Cluster) -> None:
    before = [p["pid"] for p in running.state()["processes"]]
    running.eccon("up")
    assert [p["pid"] for p in running.state()["processes"]] == before
