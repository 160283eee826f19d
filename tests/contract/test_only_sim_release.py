"""The stand-in as another release of vLLM. With `ECCON_SIM_VLLM=0.32.0` it is asked the whole contract."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eccon.signals.connector import ItemEvent, parse
from tests.contract.client import ask, fresh, get, part
from tests.contract.target import Server, SimTarget, free_port


class Later(SimTarget):
    version = "0.32.0"


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Later]:
    made = Later(tmp_path_factory.mktemp("later"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def encoder(later: Later) -> Iterator[Server]:
    server = later.encoder(free_port())
    with later.lent(server):
        yield server


def test_it_says_which_it_is(encoder: Server) -> None:
    assert get(encoder, "/version").json() == {"version": "0.32.0"}
    assert "vLLM server version 0.32.0, serving model " in encoder.log()


def test_names_of_processes_are_where_the_format_has_them(later: Later, encoder: Server) -> None:
    """With the format for this release lines are as before. They are read, and bare ones too."""
    u = fresh()
    assert ask(encoder, [part(u)], max_tokens=1).status == 200
    encoder.wait_event(f"pushed mm_hash={u}")
    line = next(x for x in encoder.log().splitlines() if f"pushed mm_hash={u}" in x)
    assert re.match(r"\(EngineCore pid=\d+\) \d{10}\.\d{6} DEBUG ", line)
    for text in (line, line.partition(") ")[2]):
        (event,) = parse(text.encode() + b"\n")
        assert isinstance(event, ItemEvent)
        assert (event.step, event.mm_hash) == ("pushed", u)


def test_its_own_format_names_processes_in_its_own_lines_only(later: Later) -> None:
    server = later.pd(free_port(), env={"VLLM_LOGGING_CONFIG_PATH": ""})
    with later.lent(server):
        server.wait_log(r"(?m)^\(EngineCore pid=\d+\) INFO \S+ \S+ \[core\.py:\d+\] init engine")
        server.wait_log(r"(?m)^\[vllm-rbln\] INFO .* PULL bound on tcp://")


def test_media_options_of_requests_want_a_flag(later: Later, encoder: Server) -> None:
    for key in ("mm_processor_kwargs", "media_io_kwargs"):
        reply = ask(encoder, [part()], **{key: {"image": {}}})  # type: ignore[arg-type]
        assert (reply.status, reply.error()["param"]) == (400, key)
        assert ask(encoder, [part()], **{key: {}}).status == 200  # type: ignore[arg-type]
    trusting = later.encoder(free_port(), *later.release.trusting)
    with later.lent(trusting):
        reply = ask(trusting, [part()], max_tokens=1, mm_processor_kwargs={"max_pixels": 200_704})
        assert reply.status == 200


def test_the_flag_is_unknown_to_the_release_before(tmp_path: Path) -> None:
    earlier = SimTarget(tmp_path)
    try:
        server = earlier.pd(free_port(), "--trust-request-mm-kwargs", env={"ECCON_SIM_VLLM": "0.30.0"})
        assert server.exit_code(20) == 2
    finally:
        earlier.close()


def test_a_release_that_is_not_known() -> None:
    argv = [sys.executable, "-m", "eccon.sim", "--version"]
    env = {"ECCON_SIM_VLLM": "0.1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    assert done.stderr == "ECCON_SIM_VLLM='0.1': must be 0.30.0 or 0.32.0\n"
