"""The console in a browser of this machine: each tab is a console of its own, drawn by textual-serve.

textual-serve has no authentication, and any page that the browser shows may open a connection to a
loopback port. So the address printed carries a key, which becomes a cookie; without it, or from
another page, or under another host name, nothing is served.
"""

import asyncio
import hmac
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from textual_serve.server import Server

__all__ = ["LOOPBACK", "serve"]

LOOPBACK = "127.0.0.1"
COOKIE = "eccon"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _policy(host: str) -> str:
    """Nothing is loaded from elsewhere (the page as it comes asks a font service)."""
    own = "'self' 'unsafe-inline' 'unsafe-eval' data: blob:"
    return f"default-src {own}; connect-src 'self' ws://{host}; frame-ancestors 'none'"


class _Quiet(Server):
    """Without its banner: what is said on a terminal is said by the command."""

    async def on_startup(self, app: web.Application) -> None:
        """Says nothing."""

    async def application(self, key: str, hosts: Sequence[str]) -> web.Application:
        """The application behind a guard; `hosts`: how it may be called, with the port."""
        app = await self._make_app()
        cookie = f"{COOKIE}-{self.port}"  # cookies do not know ports, and there may be several consoles

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            origin = request.headers.get("Origin")
            if request.host not in hosts or origin not in (None, *(f"http://{host}" for host in hosts)):
                raise web.HTTPForbidden(text="not from here\n")
            asked = request.query.get("key", "")
            if not hmac.compare_digest((asked or request.cookies.get(cookie, "")).encode(), key.encode()):
                raise web.HTTPForbidden(text="open the address that `eccon web` printed\n")
            if asked:  # out of the address bar, and out of what the page may leak as its referrer
                moved = web.HTTPSeeOther(request.path)
                moved.set_cookie(cookie, key, httponly=True, samesite="Strict")
                raise moved
            response = await handler(request)
            if not response.prepared:
                response.headers["Content-Security-Policy"] = _policy(request.host)
                response.headers["Referrer-Policy"] = "no-referrer"
                response.headers["Cache-Control"] = "no-store"
            return response

        app.middlewares.append(guard)
        return app


async def serve(arguments: Sequence[str], port: int, title: str, ready: Callable[[str], None]) -> None:
    """Serves until SIGINT, SIGTERM or SIGHUP.

    Args:
        arguments: of `eccon`, for each tab's console.
        port: on loopback; 0 for a free one.
        ready: is told the address to open, once it answers.

    Raises:
        OSError: the port is taken.
    """
    listener = socket.create_server((LOOPBACK, port))
    port = listener.getsockname()[1]
    hosts = [f"{LOOPBACK}:{port}", f"localhost:{port}"]
    key = secrets.token_urlsafe(24)
    # The page's own addresses follow the first name: a page opened as `localhost` is sent there too.
    page = _Quiet(
        shlex.join([sys.executable, "-m", "eccon", *arguments]),
        host=LOOPBACK,
        port=port,
        title=title,
    )
    runner = web.AppRunner(await page.application(key, hosts), access_log=None)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, over.set)
    try:
        await runner.setup()
        await web.SockSite(runner, listener, shutdown_timeout=2).start()
        ready(f"http://{hosts[0]}/?key={key}")
        await over.wait()
    finally:
        await runner.cleanup()
