"""The daemon's parts that need no process: what is told, remembered, masked, and judged."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from eccon.config import Supervisor
from eccon.model import Alarm, Change, ClusterInfo, ClusterState, Process, Role, State, Trace
from eccon.signals.milestones import History, Step
from eccon.supervisor import api, store
from eccon.supervisor.backoff import Backoff
from eccon.supervisor.board import BACKLOG, RING, Board
from eccon.supervisor.httpget import Getter
from eccon.supervisor.progress import StartProgress
from eccon.supervisor.secrets import shown, shown_env
from eccon.supervisor.stalls import FLOOR_S, OutWatch, StallWatch
from eccon.supervisor.verdict import judge
from eccon_proxy.schema import ON_TRIAL, EncoderInfo, EncoderState


def board() -> Board:
    """With one process."""
    b = Board(ClusterInfo(name="t"))
    b.put(Process(name="pd", role=Role.PD, state=State.STOPPED))
    return b


async def take(stream: AsyncIterator[tuple[int, str, bytes]], count: int) -> list[tuple[int, str, bytes]]:
    """The next events."""
    return [await asyncio.wait_for(anext(stream), 5) for _ in range(count)]


def applied(state: ClusterState, events: list[tuple[int, str, bytes]]) -> ClusterState:
    """As a client does."""
    for _, name, data in events:
        if name == "snapshot":
            state = msgspec.json.decode(data, type=ClusterState)
        else:
            state = state.apply(msgspec.json.decode(data, type=Change))
    return state


async def test_states_go_out_at_once_and_figures_at_most_twice_a_second() -> None:
    b = board()
    stream = b.subscribe()
    state = applied(b.snapshot(), await take(stream, 1))
    for n in range(50):
        b.update("pd", cpu_percent=float(n))
    b.update("pd", state=State.STARTING, reason="x")
    events = await take(stream, 2)
    state = applied(state, events)
    process = state.process("pd")
    assert process is not None
    assert (process.state, process.cpu_percent) == (State.STARTING, 49.0)
    for n in range(50):
        b.update("pd", rss_bytes=n)
        b.update("pd", rss_bytes=n)
    state = applied(state, await take(stream, 1))
    assert state == b.snapshot(), "what a client has is what the daemon has"
    b.update("pd", rss_bytes=49, reason="x")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext(stream), 0.7)
    b.close()


async def test_a_client_that_comes_back_gets_what_it_missed_or_everything() -> None:
    b = board()
    seq = b.snapshot().seq
    for n in range(3):
        b.log("pd", f"event {n}")
    stream = b.subscribe(seq)
    assert [name for _, name, _ in await take(stream, 3)] == ["change"] * 3
    for n in range(RING + 5):
        b.log("pd", f"more {n}")
    for after in (seq, seq + 10**9, None):
        assert (await take(b.subscribe(after), 1))[0][1] == "snapshot"
    assert b.subscribe(b.snapshot().seq) is not None
    b.close()


async def test_a_client_that_does_not_read_is_given_a_snapshot_instead_of_a_backlog() -> None:
    b = board()
    stream = b.subscribe()
    await take(stream, 1)
    for n in range(2 * BACKLOG):
        b.log("pd", f"event {n}")
    events = await take(stream, 1)
    while events[-1][1] == "change" and len(events) < BACKLOG + 2:
        events += await take(stream, 1)
    assert events[-1][1] == "snapshot"
    assert applied(b.snapshot(), events[-1:]).events[-1].text == f"event {2 * BACKLOG - 1}"
    b.log("pd", "after")
    assert b"after" in (await take(stream, 1))[0][2]
    b.close()


async def test_a_closed_board_tells_its_last_word_and_ends() -> None:
    b = board()
    stream = b.subscribe()
    await take(stream, 1)
    b.log("pd", "last")
    b.close()
    assert [b"last" in data async for _, _, data in stream] == [True]


async def test_what_is_critical_stands_before_what_only_warns() -> None:
    b = board()
    for key, critical in (("a", False), ("b", True), ("c", False), ("d", True)):
        b.raise_alarm(
            Alarm(key=key, subject="pd", text=key, since=0.0, severity="critical" if critical else "warning")
        )
    assert [a.key for a in b.snapshot().alarms] == ["b", "d", "a", "c"]
    stream = b.subscribe()
    await take(stream, 1)
    b.raise_alarm(Alarm(key="e", subject="pd", text="why", since=0.0, severity="critical"), instead_of="b")
    (change,) = await take(stream, 1)
    assert [a.key for a in b.snapshot().alarms] == ["d", "e", "a", "c"]
    assert b'"why"' in change[2]
    b.close()


async def test_traces_are_kept_to_a_bound() -> None:
    b = board()
    gone = [g for n in range(1200) for g in b.trace(Trace(id=str(n), started_at=n))]
    assert gone == [str(n) for n in range(200)]
    b.close()


def test_back_off_doubles_with_jitter_up_to_a_cap_and_gives_up() -> None:
    policy = Supervisor(backoff_s=1, backoff_max_s=4, failures=6, backoff_reset_s=100)
    backoff = Backoff()
    waits = [backoff.died(policy, 1.0) for _ in range(6)]
    for wait, most in zip(waits[:5], (1, 2, 4, 4, 4), strict=True):
        assert wait is not None
        assert 0.75 * most <= wait <= most
    assert waits[5] is None
    assert backoff.died(policy, 99.0) is None
    assert backoff.died(policy, 100.0) is not None
    assert backoff.deaths == 1


def test_secrets_of_a_command_line_are_masked() -> None:
    argv = ["vllm", "serve", "m", "--api-key", "s3cret", "--hf-token=abc", "--max-tokens", "5", "--api-key"]
    assert shown(argv) == (
        "vllm", "serve", "m", "--api-key", "***", "--hf-token=***", "--max-tokens", "5", "--api-key",
    )  # fmt: skip


def test_secrets_of_an_environment_are_masked() -> None:
    env = {
        "VLLM_API_KEY": "a",
        "HF_TOKEN": "b",
        "MAX_TOKENS_PER_STEP": "5",
        "TOKEN_MS": "1",
        "X_PASSWORD": "",
    }
    assert dict(shown_env(env)) == env | {"VLLM_API_KEY": "***", "HF_TOKEN": "***"}


@pytest.mark.parametrize(
    ("states", "aside", "health", "said"),
    [
        ("ssss", {}, "stopped", ""),
        ("rrrr", {}, "ok", ""),
        ("rrrb", {}, "degraded", "encoder-1 backoff"),
        ("rrrr", {"encoder-0": "ejected"}, "degraded", "encoder-0 ejected"),
        ("rrrr", {"pd": "down"}, "unavailable", "pd down"),
        ("lrww", {}, "starting", "pd loading, encoder-0 waiting, encoder-1 waiting"),
        ("brww", {}, "unavailable", "pd backoff"),
        ("rrrr", {"encoder-0": "probing", "encoder-1": "joining"}, "starting", "encoder-0 probing"),
        ("rrff", {}, "unavailable", "encoder-0 failed"),
    ],
)
def test_the_cluster_s_health_in_a_word(states: str, aside: dict[str, str], health: str, said: str) -> None:
    letters = {
        "s": State.STOPPED, "r": State.READY, "b": State.BACKOFF, "l": State.LOADING,
        "w": State.WAITING, "f": State.FAILED,
    }  # fmt: skip
    names = ("pd", "proxy", "encoder-0", "encoder-1")
    found = judge(
        {n: letters[c] for n, c in zip(names, states, strict=True)}, set(names), set(names[2:]), aside
    )
    assert found[0] == health
    assert said in found[1]


def test_an_encoder_is_stuck_when_it_finishes_nothing_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("eccon.supervisor.stalls.time.monotonic", lambda: now)
    watch = StallWatch()

    def info(items: int, inflight: int, p99: float | None = 100.0) -> EncoderInfo:
        return EncoderInfo(id="e", url="u", state="ready", items=items, inflight=inflight, encode_ms_p99=p99)

    assert watch.stuck_s(info(5, 1)) is None
    now = FLOOR_S
    assert watch.stuck_s(info(5, 1)) is None
    now = FLOOR_S + 1
    assert watch.stuck_s(info(5, 1)) == FLOOR_S + 1
    assert watch.stuck_s(info(6, 1)) is None
    now += FLOOR_S + 1
    assert watch.stuck_s(info(6, 0)) is None
    now += 60
    assert watch.stuck_s(info(6, 1, None)) is None
    assert watch.stuck_s(info(6, 1, 5000.0)) == 60


def test_a_start_that_was_not_seen_whole_is_not_learnt_from() -> None:
    history = History()
    seen = StartProgress(history, Role.ENCODER, adopted=False)
    begun = time.time() - 4
    assert seen.estimate(begun).eta_s is None
    assert seen.reach(Step("loading the model", 0.35), begun)
    assert not seen.reach(Step("starting the engine", 0.20), begun)
    assert [text for text, _ in seen.milestones] == ["loading the model"]
    assert seen.ready(10.0) == "ready after 10.0 s"
    assert seen.estimate(begun).fraction == 0.35
    taken_over = StartProgress(history, Role.ENCODER, adopted=True)
    assert taken_over.estimate(begun).eta_s == 6
    taken_over.reach(Step("loading the model", 0.35), begun)
    assert taken_over.milestones == ()
    assert taken_over.ready(500.0) == "ready; when it became so was not seen"
    assert len(history.starts["encoder"]) == 1
    taken_over.begin()
    assert taken_over.ready(12.0) == "ready after 12.0 s"


def test_an_encoder_is_out_from_its_first_failure_until_it_has_encoded() -> None:
    begun = time.time() - 100
    watch = OutWatch()

    def info(state: EncoderState, since: float, reason: str = "") -> EncoderInfo:
        return EncoderInfo(id="e", url="u", state=state, reason=reason, since=since)

    def out_s(state: EncoderState, since: float, reason: str = "", *, late: float = 0.0) -> float | None:
        found = watch.out_s(info(state, since, reason), late)
        return None if found is None else round(found, -1)

    assert out_s("ready", begun) is None
    assert out_s("ready", begun, ON_TRIAL) is None
    assert out_s("ejected", begun) == 100
    assert out_s("ready", begun + 60, ON_TRIAL) == 100
    assert out_s("ejected", begun + 90, "a trial failed") == 100
    assert out_s("ejected", begun + 90, late=begun + 80) == 20
    assert out_s("ready", begun + 99) is None
    assert out_s("ejected", begun + 50) == 50
    watch.forget("e")
    assert out_s("ready", begun, ON_TRIAL) is None


async def test_the_state_file_is_whole_or_the_old_one_and_trouble_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "d" / "state.json"
    path.parent.mkdir()
    told: list[str] = []
    s = store.Store(path, lambda: store.Saved(wanted=True), told.append)
    task = asyncio.create_task(s.run())
    s.changed()
    while not path.exists():
        await asyncio.sleep(0.02)
    assert store.read(path)[0].wanted
    # No new file can be made there: the old one stays.
    path.with_name("state.json.new").mkdir()
    s.changed()
    while not told:
        await asyncio.sleep(0.02)
    assert "cannot be written" in told[0]
    assert store.read(path)[0].wanted
    path.with_name("state.json.new").rmdir()
    while len(told) < 2:
        await asyncio.sleep(0.02)
    assert told[1] == ""
    task.cancel()
    await asyncio.wait({task})


def test_a_broken_state_file_is_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text('{"version": 1, "wanted": ')
    saved, complaint = store.read(path)
    assert not saved.wanted
    assert "state.broken" in complaint
    assert (tmp_path / "state.broken").exists()
    assert store.read(path) == (store.Saved(), "")


def test_only_this_user_and_root_may_connect() -> None:
    assert api.may_connect(os.geteuid())
    assert api.may_connect(0)
    assert not api.may_connect(os.geteuid() + 1)


async def test_probes_survive_what_servers_do() -> None:
    answers = [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 503 X\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"",
        None,
    ]
    served = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            answer = answers[served]
            served += 1
            if answer is None:
                await reader.read()
                break
            writer.write(answer)
            if served > 2:
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    getter = Getter("127.0.0.1", port)
    assert await getter.get("/", {}, 2) == (200, b"ok")
    assert await getter.get("/", {}, 2) == (503, b"abc")
    assert await getter.get("/", {}, 2) == (200, b"until the end")
    with pytest.raises(ValueError, match="not HTTP"):
        await getter.get("/", {}, 2)
    with pytest.raises(EOFError):
        await getter.get("/", {}, 2)
    with pytest.raises(asyncio.TimeoutError):
        await getter.get("/", {}, 0.1)
    server.close()
    await server.wait_closed()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            await Getter("127.0.0.1", s.getsockname()[1]).get("/", {}, 2)
