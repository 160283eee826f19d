"""TLS on the public port and towards the servers behind, with a CA made for the occasion."""

import asyncio
import contextlib
import io
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.fakes import CHAT, hang
from tests.proxy.conftest import Clusters
from tests.proxy.support import JSON_TYPE, Cluster, Proxy, body_of, data_url, eventually, image, wait_for
from tests.proxy.test_run import LEAST, run
from tests.proxy.upstreams import PD, Encoder, Ledger

PASSWORD = "correct horse"


class Pki(NamedTuple):
    """Files of a throw-away CA."""

    authority: trustme.CA
    ca: Path
    cert: Path
    key: Path
    locked: Path
    """The key, under `PASSWORD`."""
    both: Path
    """Certificate and key in one file."""

    @property
    def trust(self) -> ssl.SSLContext:
        """A client that believes this CA."""
        return ssl.create_default_context(cafile=self.ca)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """A CA and a certificate for loopback."""
    folder = tmp_path_factory.mktemp("pki")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    found = Pki(authority, *(folder / name for name in ("ca", "cert", "key", "locked", "both")))
    authority.cert_pem.write_to_path(found.ca)
    found.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(found.key)
    issued.private_key_and_cert_chain_pem.write_to_path(found.both)
    key = load_pem_private_key(found.key.read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(PASSWORD.encode()))
    found.locked.write_bytes(locked)
    return found


async def ask(proxy: Proxy, context: ssl.SSLContext, body: bytes) -> tuple[int, bytes]:
    """One chat request by TLS."""
    connector = aiohttp.TCPConnector(ssl=context, force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(
            f"https://127.0.0.1:{proxy.port}{CHAT}", data=io.BytesIO(body), headers=JSON_TYPE
        ) as answer,
    ):
        return answer.status, await answer.read()


@contextlib.asynccontextmanager
async def proxy_with(
    cluster: Cluster, tmp: Path, *flags: str, env: dict[str, str] | None = None
) -> AsyncIterator[Proxy]:
    """Another proxy before the cluster's fakes."""
    proxy = await Proxy.start(
        tmp,
        *("--encode-servers-urls", ",".join(e.url for e in cluster.encoders)),
        *("--decode-servers-urls", cluster.pd.url, "--probe-interval", "0.1"),
        *flags,
        env=env,
    )
    try:

        async def ready() -> bool:
            assert proxy.process.returncode is None, proxy.log
            try:
                return all(e.state == "ready" for e in (await proxy.state()).encoders)
            except (aiohttp.ClientError, OSError):
                return False

        await eventually(ready, "its encoders are ready", 20)
        yield proxy
        assert "Traceback" not in proxy.log
    finally:
        await proxy.stop()


@pytest.mark.parametrize("form", ["two files", "one file", "password"])
async def test_the_public_port_speaks_tls(clusters: Clusters, pki: Pki, tmp_path: Path, form: str) -> None:
    cluster = await clusters.get()
    env = {}
    flags = ["--ssl-certfile", str(pki.both if form == "one file" else pki.cert)]
    if form != "one file":
        flags += ["--ssl-keyfile", str(pki.key if form == "two files" else pki.locked)]
    if form == "password":
        env = {"ECCON_PROXY_SSL_KEYFILE_PASSWORD": PASSWORD}
    async with proxy_with(cluster, tmp_path, *flags, env=env) as proxy:
        big = body_of({"type": "image_url", "image_url": {"url": data_url("big", 3_000_000)}})
        for body in (body_of(image(1)), body_of(image(2), stream=True), big):
            status, answer = await ask(proxy, pki.trust, body)
            assert status == 200
            assert b"ok" in answer
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(proxy, ssl.create_default_context(), body_of("hi"))
        assert b" 200 " not in await proxy.raw(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
        shown = (await proxy.admin("GET", "/admin/settings")).body.decode() + proxy.log
        assert PASSWORD not in shown


async def test_a_client_that_leaves_by_tls_is_gone_at_once(
    clusters: Clusters, pki: Pki, tmp_path: Path
) -> None:
    cluster = await clusters.get()
    flags = ("--ssl-certfile", str(pki.both))
    async with proxy_with(cluster, tmp_path, *flags) as proxy:
        cluster.pd.then(hang)
        asked = asyncio.ensure_future(ask(proxy, pki.trust, body_of(image(1), stream=True)))
        await wait_for(lambda: cluster.pd.calls, "at the PD")
        asked.cancel()
        await wait_for(lambda: cluster.pd.calls[0].closed_at, "the PD is told", 2)


async def test_clients_show_certificates_when_asked_to(clusters: Clusters, pki: Pki, tmp_path: Path) -> None:
    cluster = await clusters.get()
    flags = ("--ssl-certfile", str(pki.both), "--ssl-ca-certs", str(pki.ca), "--ssl-cert-reqs", "2")
    async with proxy_with(cluster, tmp_path, *flags) as proxy:
        with pytest.raises((aiohttp.ClientError, OSError)):
            await ask(proxy, pki.trust, body_of("hi"))
        context = pki.trust
        pki.authority.issue_cert("somebody@example.org").configure_cert(context)
        assert (await ask(proxy, context, body_of("hi")))[0] == 200
        stranger = pki.trust
        trustme.CA().issue_cert("somebody@example.org").configure_cert(stranger)
        with pytest.raises((aiohttp.ClientError, OSError)):
            await ask(proxy, stranger, body_of("hi"))


async def test_ciphers_and_version_hold(clusters: Clusters, pki: Pki, tmp_path: Path) -> None:
    cluster = await clusters.get()
    flags = (
        "--ssl-certfile",
        str(pki.both),
        "--ssl-ciphers",
        "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384",
    )
    async with proxy_with(
        cluster, tmp_path, *flags, "--ssl-version", str(int(ssl.PROTOCOL_TLS_SERVER))
    ) as proxy:
        context = pki.trust
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, ssl=context)
        assert "AES256-GCM-SHA384" in writer.get_extra_info("cipher")[0]
        writer.close()
        await writer.wait_closed()
        del reader


BAD = {
    "key without certificate": ("--ssl-keyfile", "{key}"),
    "no key for the certificate": ("--ssl-certfile", "{cert}"),
    "a key that is none": ("--ssl-certfile", "{cert}", "--ssl-keyfile", "{ca}"),
    "locked key, no password": ("--ssl-certfile", "{cert}", "--ssl-keyfile", "{locked}"),
    "wrong password": (
        *("--ssl-certfile", "{cert}", "--ssl-keyfile", "{locked}", "--ssl-keyfile-password", "battery"),
    ),
    "no CA for clients": ("--ssl-certfile", "{both}", "--ssl-cert-reqs", "2"),
    "no such requirement": ("--ssl-certfile", "{both}", "--ssl-ca-certs", "{ca}", "--ssl-cert-reqs", "3"),
    "no cipher": ("--ssl-certfile", "{both}", "--ssl-ciphers", "ROT13"),
    "no version": ("--ssl-certfile", "{both}", "--ssl-version", "99"),
    "a CA that is none": ("--upstream-ca", "{key}"),
    "no such CA": ("--upstream-ca", "/nowhere"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("check", [True, False], ids=["check", "start"])
async def test_files_that_do_not_fit_are_one_message(
    pki: Pki, tmp_path: Path, name: str, check: bool
) -> None:
    flags = [flag.format(**pki._asdict()) for flag in BAD[name]]
    where = ["--check"] if check else ["--host", "127.0.0.1", "--port", "0", "--admin", f"unix:{tmp_path}/a"]
    code, output = await run(*LEAST, *flags, *where)
    assert code == 2, output
    assert "--" in output
    assert "Traceback" not in output
    assert "battery" not in output


async def test_servers_behind_are_reached_by_tls(pki: Pki, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki.both)
    ledger = Ledger()
    pd = PD("pd", ledger)
    encoders = [Encoder(f"encoder-{i}", ledger, pd) for i in range(2)]
    for fake in (pd, *encoders):
        fake.tls = context
        await fake.start()
    cluster = Cluster(None, encoders, [pd], ledger)  # type: ignore[arg-type]
    try:
        async with proxy_with(cluster, tmp_path, "--upstream-ca", str(pki.ca)) as proxy:
            for n in range(4):
                body = body_of(image(n), image(n + 10), image(f"again {n}"), stream=bool(n % 2))
                reply = await proxy.chat(body)
                assert reply.status == 200, reply.body
            assert not ledger.violations
            assert (await proxy.get("/v1/models")).status == 200
            assert pd.accepted < 12, "connections are kept"
            pd.then(hang)
            asked = asyncio.ensure_future(proxy.chat(body_of(image("gone"), stream=True)))
            await wait_for(lambda: len(pd.calls) == 5, "at the PD")
            asked.cancel()
            await wait_for(lambda: pd.calls[4].closed_at, "the PD is told", 2)
        # Whom the system does not know is not spoken to.
        proxy = await Proxy.start(
            tmp_path, "--encode-servers-urls", encoders[0].url, "--decode-servers-urls", pd.url
        )
        try:
            await proxy.answers()

            async def refused() -> bool:
                state = await proxy.state()
                return "certificate" in state.pds[0].reason and "certificate" in state.encoders[0].reason

            await eventually(refused, "both are down, and the reason says why", 10)
            assert json.loads((await proxy.get("/health")).body)["status"] == "unavailable"
            assert "Traceback" not in proxy.log
        finally:
            await proxy.stop()
    finally:
        for fake in (pd, *encoders):
            await fake.stop()
