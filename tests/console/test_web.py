"""`eccon web`: a console a tab, for who has the key, and nobody from another page or name."""

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aiohttp
import pytest
from PIL import Image

from tests.console.browser import CHROMIUM, browser
from tests.console.fake_daemon import FakeDaemon

pytest.importorskip("textual_serve", reason="eccon[web] is not installed: the page is not tested")


@contextmanager
def serving(daemon: FakeDaemon) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command on a free port; the address that it printed."""
    home = str(daemon.socket.parent)
    process = subprocess.Popen(
        [sys.executable, "-m", "eccon", "web", "--socket", str(daemon.socket), "--port", "0"],
        env={**os.environ, "HOME": home, "XDG_CONFIG_HOME": home, "LANG": "C.UTF-8"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


async def until(there: Callable[[], object], seconds: float = 30.0) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while not there():
        assert asyncio.get_running_loop().time() < end, "not in time"
        await asyncio.sleep(0.05)


async def test_a_tab_is_a_console_for_who_has_the_key(daemon: FakeDaemon) -> None:
    with serving(daemon) as (url, process):
        base, _, key = url.partition("/?key=")
        assert base.startswith("http://127.0.0.1:")
        assert len(key) > 20
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar) as session:

            async def status(address: str, **headers: str) -> int:
                async with session.get(address, headers=headers, allow_redirects=False) as answer:
                    return answer.status

            assert await status(base) == 403
            assert await status(f"{base}/ws") == 403
            assert await status(f"{base}/?key=wrong") == 403
            assert await status(url, Host="evil.example") == 403
            assert await status(url, Origin="http://evil.example") == 403
            async with session.get(url) as page:
                assert page.status == 200
                assert "key=" not in str(page.url)
                assert "default-src 'self'" in page.headers["Content-Security-Policy"]
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect(f"{base}/ws", origin="http://evil.example")
            async with session.ws_connect(f"{base}/ws?width=100&height=30") as tab:
                screen = b""
                while b"encoder-3" not in screen:
                    message = await tab.receive(timeout=30)
                    if message.type is aiohttp.WSMsgType.BINARY:
                        screen += message.data
                assert daemon.streams == 1
            await until(lambda: daemon.streams == 0)  # the tab is closed, its console ends
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: the page is not looked at in a browser")
async def test_a_key_pressed_in_a_browser_acts(daemon: FakeDaemon) -> None:
    with serving(daemon) as (url, _):
        async with browser(url) as page:
            await until(lambda: daemon.streams == 1)
            for _ in range(600):
                if "-first-byte" in str(await page.evaluate("document.body.className")):
                    break
                await asyncio.sleep(0.05)
            assert "-first-byte" in str(await page.evaluate("document.body.className"))
            await page.evaluate("document.querySelector('textarea').focus()")
            wanted = "POST /v1/processes/pd/restart"
            for _ in range(60):  # the question must be there before it is answered
                await page.type("r")
                await asyncio.sleep(0.5)
                await page.type("y")
                if wanted in daemon.requests:
                    break
            await until(lambda: wanted in daemon.requests, 5)
            with Image.open(io.BytesIO(await page.screenshot())) as picture:
                colours = picture.convert("RGB").getcolors(1 << 24)
            assert colours is not None
            assert len(colours) > 20
        await until(lambda: daemon.streams == 0)


async def test_a_port_that_is_taken_and_a_daemon_that_is_not_there(daemon: FakeDaemon) -> None:
    with serving(daemon) as (url, _):
        port = url.split("/")[2].rpartition(":")[2]
        for arguments, code, said in (
            (["--socket", str(daemon.socket), "--port", port], 2, f"port {port}"),
            (["--socket", str(daemon.socket.parent / "none")], 3, "no daemon answers"),
        ):
            done = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "eccon", "web", *arguments), stderr=asyncio.subprocess.PIPE
            )
            _, err = await done.communicate()
            assert done.returncode == code
            assert said in err.decode()
