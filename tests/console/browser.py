"""Headless Chromium over its debugging protocol: opens a page, types, looks."""

import asyncio
import base64
import contextlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

__all__ = ["CHROMIUM", "Browser", "browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result; events are dropped."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message: dict[str, Any] = await self._socket.receive_json(timeout=30)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    async def type(self, text: str) -> None:
        """Presses keys."""
        for c in text:
            code = ord(c.upper())
            await self.call(
                "Input.dispatchKeyEvent", type="keyDown", text=c, key=c, windowsVirtualKeyCode=code
            )
            await self.call("Input.dispatchKeyEvent", type="keyUp", key=c)

    async def screenshot(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])


@contextlib.asynccontextmanager
async def browser(url: str, width: int = 1280, height: int = 800) -> AsyncIterator[Browser]:
    """A browser with the page open; it is ended with all its processes."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="ec", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--remote-debugging-port=0", f"--user-data-dir={profile}"),
                *(f"--window-size={width},{height}", "--no-first-run", "about:blank"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            told = Path(profile) / "DevToolsActivePort"
            for _ in range(600):
                if told.exists() and len(told.read_text().split()) == 2:
                    break
                await asyncio.sleep(0.05)
            port = told.read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as response:
                    page = next(p for p in await response.json() if p["type"] == "page")
                async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    opened = Browser(socket)
                    await opened.call("Page.navigate", url=url)
                    yield opened
                    with contextlib.suppress(AssertionError, TypeError, asyncio.TimeoutError):
                        await opened.call("Browser.close")
        finally:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
