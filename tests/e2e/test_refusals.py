"""What is wrong is said in one message, exit code 2, and nothing is started."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.cluster import Cluster, until


def refused(c: Cluster, *words: str) -> str:
    done = c.eccon("up", code=2)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert c.processes() == []
    assert not c.socket.exists()
    return done.stderr


def test_bad_configuration(fresh: Cluster) -> None:
    text = fresh.config.read_text().replace("[pd]\nport", "[pd]\nprot")
    fresh.config.write_text(text)
    line = text.splitlines().index("[pd]") + 2
    message = refused(
        fresh, f"eccon.toml:{line}: pd.prot = {fresh.ports[1]}: unknown key; did you mean port?"
    )
    assert len(message.splitlines()) == 1


def test_unknown_model_directory(fresh: Cluster) -> None:
    fresh.config.write_text(fresh.config.read_text().replace('"Qwen3-VL-demo"', '"Qwen3-VL-gone"'))
    assert len(refused(fresh, "model.path", "Qwen3-VL-gone", "no such directory").splitlines()) == 1


def test_unknown_vllm_command(fresh: Cluster) -> None:
    text = fresh.config.read_text().replace('kind = "sim"', 'vllm = "/nowhere/vllm"')
    fresh.config.write_text(text)
    refused(fresh, "launcher.vllm", "/nowhere/vllm")


@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["proxy", "pd", "connector", "encoder"])
def test_a_taken_port_is_named_with_its_holder(fresh: Cluster, which: int) -> None:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", fresh.ports[which]))
        s.listen()
        refused(fresh, str(fresh.ports[which]), "pid")


def test_no_configuration_at_all(fresh: Cluster) -> None:
    fresh.config.unlink()
    done = fresh.eccon("up", code=2)
    assert "no such file" in done.stderr


def test_commands_without_a_daemon_say_so(fresh: Cluster) -> None:
    for command in (["status"], ["down"], ["add"], ["logs", "pd"], ["send"], ["traces"], ["restart", "pd"]):
        done = fresh.eccon(*command, code=3)
        assert len(done.stderr.splitlines()) == 1, done.stderr


HOLDER = """
import socket, sys
s = socket.socket()
s.bind(("127.0.0.1", int(sys.argv[1])))
s.listen()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(port: int) -> Iterator[int]:
    """The port in the hands of a process whose command line has line ends and an escape sequence. Its pid."""
    argv = [sys.executable, "-c", HOLDER, str(port), "\x1b[2J"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder.pid
        holder.communicate()


@pytest.mark.timeout(300)
def test_a_taken_port_is_named_and_partial_starts_the_rest(fresh: Cluster) -> None:
    port = fresh.ports[3]
    with held(port) as pid:
        message = refused(fresh, f"encoder-0: port {port} is held by pid {pid} (")
        assert len(message.splitlines()) == 1
        assert "\x1b" not in message

        said = fresh.eccon("up", "--partial", timeout=110).stderr
        assert f"without encoder-0: port {port} is held by pid {pid}" in said
        assert said.splitlines()[-1] == f"ready: {fresh.public_url}"
        table = fresh.eccon("status").stdout
        assert len(table.splitlines()) == 6, table
        assert "\x1b" not in table
        fresh.eccon("send", "-t", "hello", "--samples")
    until(lambda: fresh.process("encoder-0")["state"] == "ready" or None, "the port is taken back", 60)


@pytest.mark.timeout(300)
def test_partial_without_a_pd_is_no_success(fresh: Cluster) -> None:
    with held(fresh.ports[1]) as pid:
        said = fresh.eccon("up", "--partial", code=1, timeout=110).stderr
        assert f"held by pid {pid}" in said
        assert fresh.process("pd")["state"] == "blocked"
