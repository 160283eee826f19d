"""How it is started and ended: flags, environment, file, check, ports, signals."""

import asyncio
import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest

from eccon_proxy.settings import keys
from tests.fakes import hang
from tests.proxy.conftest import Clusters
from tests.proxy.support import Proxy, body_of, eventually, free_port, image, wait_for

PD_URL = "http://127.0.0.1:9"
LEAST = ("--encode-servers-urls", "", "--decode-servers-urls", PD_URL)


async def run(*argv: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> tuple[int, str]:
    """Run it to its end; exit code and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "eccon_proxy", *argv),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, output.decode()


BAD = {
    "no PD": ("--encode-servers-urls", "http://127.0.0.1:1"),
    "unknown flag": (*LEAST, "--nonsense"),
    "port too high": (*LEAST, "--port", "70000"),
    "port is no number": (*LEAST, "--port", "abc"),
    "url without scheme": ("--encode-servers-urls", "127.0.0.1:1", "--decode-servers-urls", PD_URL),
    "ftp": ("--encode-servers-urls", "ftp://127.0.0.1:1", "--decode-servers-urls", PD_URL),
    "same encoder twice": (
        *("--encode-servers-urls", "http://127.0.0.1:1,http://localhost:1/", "--decode-servers-urls", PD_URL),
    ),
    "PD is an encoder": ("--encode-servers-urls", PD_URL, "--decode-servers-urls", PD_URL),
    "two PDs": (*LEAST[:2], "--decode-servers-urls", f"{PD_URL},http://127.0.0.1:8"),
    "unknown policy": (*LEAST, "--policy", "random"),
    "unknown kind": (*LEAST, "--encode-kinds", "hologram_url"),
    "negative time": (*LEAST, "--encode-timeout", "-1"),
    "not a number": (*LEAST, "--encode-timeout", "nan"),
    "zero items": (*LEAST, "--pd-items", "0"),
    "affinity without content": (*LEAST, "--policy", "affinity"),
    "unsafe identity": (*LEAST, "--identity", "content"),
    "clients' names behind the guard": (*LEAST, "--identity", "off", "--guard", "on"),
    "admin in no form": (*LEAST, "--admin", "nonsense"),
    "an empty key": (*LEAST, "--api-key", ""),
    "a key of several lines": (*LEAST, "--upstream-api-key", "sk\r\nx-injected: 1"),
    "no connector": (*LEAST, "--connector", ""),
    "a download without time": (*LEAST, "--inline-timeout", "nan"),
    "traces in less than nothing": (*LEAST, "--trace-bytes", "-1"),
    "group of strangers": (*LEAST, "--group", "http://127.0.0.1:7=http://127.0.0.1:6"),
    "no such certificate": (*LEAST, "--ssl-certfile", "/nowhere.pem", "--ssl-keyfile", "/nowhere.key"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_settings_end_with_one_message(name: str) -> None:
    code, output = await run("--check", *BAD[name])
    assert code == 2, output
    assert "Traceback" not in output
    assert output.strip()
    assert len(output) < 2000


@pytest.mark.parametrize(
    "line",
    [
        "api_keys = 5", "api_keys = [5]", 'api_keys = [""]', "decode_servers_urls = 5",
        "decode_servers_urls = [[1]]", "encoders_file = 5", "groups = {}", "port = true", "policy = 5",
    ],
)  # fmt: skip
async def test_a_file_with_the_wrong_types_ends_with_one_message(tmp_path: Path, line: str) -> None:
    file = tmp_path / "proxy.toml"
    name = line.partition(" ")[0]
    file.write_text(line + ("" if name == "decode_servers_urls" else f'\ndecode_servers_urls = "{PD_URL}"'))
    code, output = await run("--check", "--config", str(file))
    assert code == 2, output
    assert "Traceback" not in output
    assert name.replace("_", "-").rstrip("s") in output.replace("_", "-")


async def test_one_key_in_a_file_is_one_key(tmp_path: Path) -> None:
    file, key_file = tmp_path / "proxy.toml", tmp_path / "keys"
    file.write_text(f'api_key = "sk-secret"\ndecode_servers_urls = "{PD_URL}"')
    code, output = await run("--check", "--config", str(file))
    assert code == 0, output
    assert 'api_keys = ["***"]' in output, "not one for each of its characters"
    key_file.write_text("# mine\nsk#1,2\n\n")
    assert keys(str(key_file)) == ["sk#1,2"]
    key_file.write_text("# none\n")
    code, output = await run("--check", *LEAST, "--api-key-file", str(key_file))
    assert code == 2, output
    assert "holds no key" in output


async def test_check_validates_and_ends() -> None:
    code, output = await run("--check", *LEAST)
    assert code == 0, output
    code, output = await run(
        "--check",
        *(
            "--encode-servers-urls",
            "http://127.0.0.1:1, http://127.0.0.1:2,",
            "--decode-servers-urls",
            PD_URL,
        ),
        *("--policy", "least_work", "--api-key", "sk-hidden"),
    )
    assert code == 0, output
    assert "sk-hidden" not in output


async def test_check_needs_no_port() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        code, _ = await run("--check", *LEAST, "--host", "127.0.0.1", "--port", str(sock.getsockname()[1]))
    assert code == 0


async def test_help_names_the_guides_flags() -> None:
    code, output = await run("--help")
    assert code == 0
    for flag in ("--host", "--port", "--encode-servers-urls", "--decode-servers-urls", "--admin", "--check"):
        assert flag in output


async def test_a_taken_port_is_one_message(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        proxy = await Proxy.start(tmp_path, *LEAST, port=sock.getsockname()[1])
        assert await proxy.exited(20) not in {0, None}
    assert str(proxy.port) in proxy.log
    assert "Traceback" not in proxy.log
    assert not proxy.admin_socket.exists()


async def test_two_proxies_never_share_a_port(tmp_path: Path) -> None:
    first = await Proxy.start(tmp_path, *LEAST)
    await first.answers()
    (tmp_path / "two").mkdir()
    second = await Proxy.start(tmp_path / "two", *LEAST, port=first.port)
    assert await second.exited(20) != 0
    await first.answers()
    await first.stop()


async def test_a_live_admin_socket_is_not_taken_over(tmp_path: Path) -> None:
    first = await Proxy.start(tmp_path, *LEAST)
    await first.answers()
    second = await Proxy.start(tmp_path, *LEAST, "--admin", f"unix:{first.admin_socket}", admin=False)
    assert await second.exited(20) != 0
    assert "Traceback" not in second.log
    await first.answers()
    await first.stop()


async def test_a_stale_admin_socket_is_replaced(tmp_path: Path) -> None:
    first = await Proxy.start(tmp_path, *LEAST)
    await first.answers()
    await first.stop()
    assert first.admin_socket.exists(), "SIGKILL leaves it"
    again = await Proxy.start(tmp_path, *LEAST, port=first.port)
    await again.answers()
    assert stat.S_IMODE(again.admin_socket.stat().st_mode) == 0o600
    await again.stop()


async def test_a_file_in_place_of_the_socket_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    proxy = await Proxy.start(tmp_path, *LEAST, "--admin", f"unix:{precious}", admin=False)
    assert await proxy.exited(20) != 0
    assert precious.read_text() == "mine"


async def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    env = {
        "ECCON_PROXY_ENCODE_TIMEOUT": "12.5",
        "ECCON_PROXY_DECODE_SERVERS_URLS": PD_URL,
        "ECCON_PROXY_POLICY": "least_inflight",
    }
    proxy = await Proxy.start(tmp_path, "--encode-servers-urls", "", "--policy", "least_work", env=env)
    await proxy.answers()
    settings = json.dumps((await proxy.admin("GET", "/admin/settings")).json())
    assert "12.5" in settings
    assert "least_work" in settings, "a flag wins over the environment"
    assert "least_inflight" not in settings
    await proxy.stop()
    code, output = await run("--check", *LEAST, env={"ECCON_PROXY_ENCODE_TIMEOUT": "soon"})
    assert code == 2
    assert "ENCODE_TIMEOUT" in output.upper().replace("-", "_")


async def test_settings_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "proxy.toml"
    lines = (f'decode_servers_urls = ["{PD_URL}"]', "encode_timeout = 12.5", "pd_items = 7")
    path.write_text("\n".join((*lines, 'policy = "least_inflight"', "")))
    proxy = await Proxy.start(tmp_path, "--config", str(path), "--pd-items", "8")
    await proxy.answers()
    settings = (await proxy.admin("GET", "/admin/settings")).json()
    flat = json.dumps(settings)
    assert "12.5" in flat
    assert "least_inflight" in flat
    assert '"pd_items": 8' in flat
    await proxy.stop()
    path.write_text("encode_timeot = 3\n")
    code, output = await run("--check", *LEAST, "--config", str(path))
    assert code == 2
    assert "encode_timeot" in output
    assert "Traceback" not in output


async def test_sighup_reads_the_encoders_file_again(clusters: Clusters, tmp_path: Path) -> None:
    cluster = await clusters.get(encoders=3)
    listed = tmp_path / "encoders"
    listed.write_text(f"{cluster.encoders[0].url}\n")
    proxy = await Proxy.start(
        tmp_path,
        *("--encode-servers-urls", "", "--decode-servers-urls", cluster.pd.url),
        *("--encoders-file", str(listed), "--probe-interval", "0.1"),
    )
    await proxy.answers()

    async def urls(*wanted: str) -> bool:
        state = await proxy.state()
        return [e.url for e in state.encoders if e.state == "ready"] == list(wanted)

    await eventually(lambda: urls(cluster.encoders[0].url), "the one in the file", 10)
    listed.write_text("# two now\n" + "".join(f"{encoder.url}\n" for encoder in cluster.encoders[:2]))
    proxy.signal(signal.SIGHUP)
    await eventually(lambda: urls(*(e.url for e in cluster.encoders[:2])), "a second one", 10)
    listed.write_text("nonsense\n")
    proxy.signal(signal.SIGHUP)
    listed_wrongly = len(proxy.log)
    await wait_for(lambda: "nonsense" in proxy.log, "it says so", 5)
    assert listed_wrongly is not None
    assert len((await proxy.state()).encoders) == 2, "a bad file changes nothing"
    listed.write_text(f"{cluster.encoders[1].url}\n")
    proxy.signal(signal.SIGHUP)
    await eventually(lambda: urls(cluster.encoders[1].url), "one is gone", 10)
    assert "Traceback" not in proxy.log
    await proxy.stop()


async def test_sighup_with_several_pds(clusters: Clusters, tmp_path: Path) -> None:
    cluster = await clusters.fresh(encoders=4, pds=2)
    one, two = cluster.pds
    mine = [[e for e in cluster.encoders if e.pd is pd] for pd in cluster.pds]
    listed = tmp_path / "encoders"
    listed.write_text(f"{one.url} = {mine[0][0].url}\n")
    proxy = await Proxy.start(
        tmp_path,
        *("--decode-servers-urls", f"{one.url},{two.url}", "--encode-servers-urls", mine[1][0].url),
        *(f"--group={two.url}={mine[1][0].url}", "--encoders-file", str(listed), "--probe-interval", "0.1"),
    )
    await proxy.answers()

    async def members(*wanted: str) -> bool:
        state = await proxy.state()
        return {e.url for e in state.encoders if e.state == "ready"} == set(wanted)

    await eventually(lambda: members(mine[0][0].url, mine[1][0].url), "flags and file", 10)
    everybody = [e.url for e in cluster.encoders]
    listed.write_text(
        f"{one.url}={mine[0][0].url},{mine[0][1].url}\n"
        f"{two.url.replace('127.0.0.1', 'localhost')} = {mine[1][1].url} # later\n"
    )
    proxy.signal(signal.SIGHUP)
    await eventually(lambda: members(*everybody), "two more", 10)
    for n in range(12):
        assert (await proxy.chat(body_of(image(n), image(n + 50)))).status == 200
    assert not cluster.ledger.violations
    for encoder in cluster.encoders:
        assert encoder.encodes
        for seen in encoder.encodes:
            uuid = seen.json()["messages"][0]["content"][0]["uuid"].encode()
            assert any(uuid in call.body for call in encoder.pd.calls), "its own PD got the item"
    for bad, word in (
        (f"{mine[0][0].url}\n", "several PDs"),
        (f"http://127.0.0.1:9={mine[0][0].url}\n", "not among"),
        (f"{two.url}={mine[0][0].url}\n", "let it leave first"),
        (f"{one.url}={mine[0][0].url}\n{two.url}={mine[0][0].url}\n", "two PDs"),
        (f"{one.url}={two.url}\n", "is a PD"),
        (f"{one.url}={proxy.url}\n", "itself"),
        (f"{one.url}=nonsense\n", "not an http URL"),
    ):
        at = len(proxy.log)
        listed.write_text(bad)
        proxy.signal(signal.SIGHUP)
        await wait_for(lambda: "nothing changed" in proxy.log[at:], "it is refused", 5)  # noqa: B023
        assert word in proxy.log[at:]
        assert await members(*everybody)
    listed.unlink()
    at = len(proxy.log)
    proxy.signal(signal.SIGHUP)
    await wait_for(lambda: "nothing changed" in proxy.log[at:], "no file, no change", 5)
    listed.write_text("")
    proxy.signal(signal.SIGHUP)
    await eventually(lambda: members(mine[1][0].url), "only the flags' own is left", 10)
    assert "Traceback" not in proxy.log
    await proxy.stop()


async def test_sighup_without_a_file_ends_nothing(clusters: Clusters) -> None:
    cluster = await clusters.get()
    cluster.proxy.signal(signal.SIGHUP)
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200
    assert cluster.proxy.process.returncode is None


async def test_signals_while_encoding_end_it_in_order(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--drain-delay", "0.1", "--shutdown-grace", "0.5")
    for encoder in cluster.encoders:
        encoder.always(hang)
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1))))
    await wait_for(lambda: cluster.encodes, "encoding")
    cluster.proxy.signal(signal.SIGTERM)
    reply = await asked
    reply.error(502, 503, 504)
    assert await cluster.proxy.exited() == 0
    assert not cluster.pd.calls
    assert not cluster.proxy.admin_socket.exists()


async def test_an_early_signal_is_not_lost(tmp_path: Path) -> None:
    proxy = await Proxy.start(tmp_path, *LEAST)
    await wait_for(lambda: proxy.log or proxy.admin_socket.exists() or _listens(proxy.port), "it starts", 20)
    proxy.signal(signal.SIGTERM)
    await proxy.exited(10)
    assert "Traceback" not in proxy.log


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


async def test_one_line_a_request_and_nothing_secret(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--log-format", "json")
    at = len(cluster.proxy.log)
    headers = {"authorization": "Bearer sk-HIDDEN", "x-request-id": "logged"}
    assert (await cluster.proxy.chat(body_of(image("pixels")), headers)).status == 200
    assert (await cluster.proxy.chat(b"{bad\nline", {"x-request-id": "bad"})).status == 400
    await wait_for(lambda: '"bad"' in cluster.proxy.log[at:], "logged")
    lines = [json.loads(line) for line in cluster.proxy.log[at:].splitlines() if line.startswith("{")]
    mine = [line for line in lines if "logged" in json.dumps(line)]
    assert len(mine) == 1
    assert "sk-HIDDEN" not in cluster.proxy.log
    assert image("pixels")["image_url"]["url"][-30:] not in cluster.proxy.log


async def test_port_free_again_after_the_end(tmp_path: Path) -> None:
    port = free_port()
    for _ in range(2):
        proxy = await Proxy.start(tmp_path, *LEAST, "--drain-delay", "0", port=port)
        await proxy.answers()
        proxy.signal(signal.SIGTERM)
        assert await proxy.exited() == 0
