"""`--inline-media`: one download, data URLs to both sides, and bounds on what is fetched."""

import base64
import gzip
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

from tests.proxy.conftest import Clusters
from tests.proxy.support import PNG, Cluster, body_of, text

FLAGS = ("--inline-media", "--inline-max-bytes", "5000", "--inline-timeout", "1")


class Site:
    """A web server with images."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[str] = []

    def url(self, path: str) -> str:
        """Address of a file."""
        return f"http://127.0.0.1:{self.port}{path}"

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer by the path."""
        self.asked.append(request.path)
        match request.path:
            case "/redirect":
                return web.Response(status=302, headers={"location": "/image"})
            case "/loop":
                return web.Response(status=302, headers={"location": "/loop"})
            case "/file":
                return web.Response(status=302, headers={"location": "file:///etc/passwd"})
            case "/page":
                return web.Response(text="<html>", content_type="text/html")
            case "/big":
                return web.Response(body=b"x" * 4000, content_type="image/png")
            case "/large":
                return web.Response(body=b"x" * 6000, content_type="image/png")
            case "/quoted":
                return web.Response(body=PNG, headers={"content-type": 'image/a"}},"uuid":"x'})
            case "/coded":
                return web.Response(
                    body=gzip.compress(bytes(1000)),
                    headers={"content-type": "image/png", "content-encoding": "gzip"},
                )
            case "/image":
                return web.Response(body=PNG, content_type="image/png")
        return web.Response(status=404)


@pytest_asyncio.fixture(loop_scope="session")
async def site() -> AsyncIterator[Site]:
    """A site on loopback."""
    one = Site()
    app = web.Application()
    app.router.add_get("/{path:.*}", one.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    one.port = runner.addresses[0][1]
    yield one
    await runner.cleanup()


def remote(url: str, **extra: object) -> dict[str, object]:
    """An image part with an address."""
    return {"type": "image_url", "image_url": {"url": url, **extra}}


@pytest_asyncio.fixture(loop_scope="session")
async def allowed(clusters: Clusters) -> Cluster:
    """A proxy that may fetch from private addresses: loopback is one."""
    return await clusters.get(*FLAGS, "--inline-private")


async def test_one_download_and_data_urls_on_both_sides(allowed: Cluster, site: Site) -> None:
    image = site.url("/image")
    body = body_of(text(), remote(image), remote(site.url("/redirect"), detail="low"), remote(image), x=1.0)
    assert (await allowed.proxy.chat(body)).status == 200
    # The redirect leads to the same image, but that is not known before.
    assert sorted(site.asked) == ["/image", "/image", "/redirect"], "identical parts are fetched once"
    data = "data:image/png;base64," + base64.b64encode(PNG).decode()
    parts = allowed.pd.calls[0].json()["messages"][0]["content"]
    assert [p["image_url"] for p in parts[1:]] == [
        {"url": data},
        {"url": data, "detail": "low"},
        {"url": data},
    ]
    assert b'"x": 1.0' in allowed.pd.calls[0].body
    assert allowed.encodes == 2


async def test_data_urls_stay_as_they_are(allowed: Cluster, site: Site) -> None:
    body = body_of(remote("data:image/png;base64," + base64.b64encode(PNG).decode()))
    assert (await allowed.proxy.chat(body)).status == 200
    assert not site.asked


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/missing", "404"),
        ("/page", "no image"),
        ("/large", "longer than 5000"),
        ("/loop", "redirects"),
        ("/file", "no http URL"),
        ("/quoted", "no image"),
        ("/coded", "coding"),
    ],
)
async def test_what_may_not_be_fetched_is_a_400(allowed: Cluster, site: Site, path: str, word: str) -> None:
    error = (await allowed.proxy.chat(body_of(remote(site.url(path))))).error(400)
    assert word in error["message"]
    assert error["param"] == "messages[0].content[0]"
    assert not allowed.encodes


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "169.254.169.254", "10.0.0.1", "[::1]", "[::ffff:127.0.0.1]",
        "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0", "127.0.0.1.", "localhost.",
        "127。0。0。1", "１２７.0.0.1", "user@127.0.0.1", "[::127.0.0.1]", "[64:ff9b::7f00:1]",
        "[2002:7f00:1::1]", "[::]", "[fec0::1]", "[fe80::1%25lo]", "[fd00::1]", "100.64.0.1", "224.0.0.1",
    ],
)  # fmt: skip
async def test_no_address_of_the_own_network(clusters: Clusters, site: Site, host: str) -> None:
    cluster = await clusters.get(*FLAGS)
    url = f"http://{host}:{site.port}/image"
    (await cluster.proxy.chat(body_of(remote(url)))).error(400)
    assert not site.asked
    assert not cluster.pd.calls


async def test_one_address_is_fetched_once_whatever_else_differs(allowed: Cluster, site: Site) -> None:
    url = site.url("/image")
    body = body_of(remote(url), remote(url, detail="low"), remote(url, detail="high"))
    assert (await allowed.proxy.chat(body)).status == 200
    assert site.asked == ["/image"]
    assert allowed.encodes == 3


async def test_nothing_is_fetched_for_more_items_than_fit(allowed: Cluster, site: Site) -> None:
    body = body_of(*(remote(site.url(f"/image?{n}")) for n in range(33)))
    (await allowed.proxy.chat(body)).error(400)
    assert not site.asked


async def test_an_image_in_many_places_does_not_make_a_body_without_end(
    clusters: Clusters, site: Site
) -> None:
    cluster = await clusters.get(*FLAGS, "--inline-private", "--max-body", "20000")
    body = body_of(*[remote(site.url("/big"))] * 9)
    assert "longer than 20000" in (await cluster.proxy.chat(body)).error(400)["message"]
    body = body_of(*(remote(site.url(f"/big?{n}")) for n in range(9)))
    assert "longest body" in (await cluster.proxy.chat(body)).error(400)["message"]
    assert not cluster.encodes
