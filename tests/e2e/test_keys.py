"""API keys: the cluster works with them, clients need one, and nobody on the host can read them off."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from eccon import prompt
from tests.e2e.cluster import Cluster, cluster

pytestmark = pytest.mark.timeout(400)  # a cluster starts within the first test

CLIENT, SERVERS = "sk-client-3f9a", "sk-servers-7c1e"


@pytest.fixture(scope="module")
def locked() -> Iterator[Cluster]:
    with cluster(encoders=2) as c:
        for name, key in (("clients", CLIENT), ("servers", SERVERS)):
            (c.directory / name).write_text(f"{key}\n")
            (c.directory / name).chmod(0o600)
        text = c.config.read_text().replace("[model]", '[model]\napi_key_file = "servers"')
        c.config.write_text(text.replace("[proxy]", '[proxy]\napi_key_file = "clients"'))
        c.eccon("up", timeout=110)
        yield c


def asked(url: str, key: str) -> tuple[int, bytes]:
    body = prompt.build("Qwen3-VL-demo", "What is there?", [str(prompt.samples()[0])], max_tokens=64)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read()


def test_a_client_needs_a_key_of_its_own(locked: Cluster) -> None:
    status, body = asked(locked.public_url, CLIENT)
    assert (status, "image 1" in json.loads(body)["choices"][0]["message"]["content"].lower()) == (200, True)
    assert asked(locked.public_url, "")[0] == 401
    assert asked(locked.public_url, "sk-wrong")[0] == 401


def test_the_servers_behind_need_theirs(locked: Cluster) -> None:
    pd = locked.process("pd")["url"]
    assert asked(pd, CLIENT)[0] == 401


def test_a_test_prompt_has_a_key(locked: Cluster) -> None:
    done = locked.eccon("send", "--samples")
    assert "image 8" in done.stderr
    done = locked.eccon("doctor", "--smoke", "--json", code=None)
    smoke = [f for f in json.loads(done.stdout) if f["check"].startswith("smoke")]
    assert {f["severity"] for f in smoke} == {"ok"}
    assert len(smoke) == 3


def test_no_key_is_seen_on_the_host_or_in_the_cluster_s_files(locked: Cluster) -> None:
    seen = [Path(f"/proc/{p.pid}/cmdline").read_bytes() for p in locked.processes()]
    seen += [p.read_bytes() for p in (locked.directory / "t").rglob("*") if p.is_file()]
    seen.append(locked.eccon("status", "--json").stdout.encode())
    seen.append(locked.eccon("config", "show", "--commands").stdout.encode())
    seen.append(locked.eccon("config", "show").stdout.encode())
    seen.append(locked.eccon("traces", "--json").stdout.encode())
    assert not any(key.encode() in text for key in (CLIENT, SERVERS) for text in seen)
