"""Asks a process over HTTP whether it is up, and whether it is what we started."""

import asyncio
import os
from typing import Any

import aiohttp
import msgspec

from eccon.launch import ProcessSpec
from eccon.model import Role
from eccon.supervisor.httpget import Getter

__all__ = ["Health", "Prober"]

NOT_YET = "nothing listens yet"


class Health(msgspec.Struct, frozen=True):
    """`ok`, or why not. `refused`: nothing listens yet; `dead`: it says itself that its engine is dead."""

    ok: bool
    reason: str = ""
    refused: bool = False
    dead: bool = False


class Prober:
    """Probes each server over a connection of its own. `async with` closes them."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._getters: dict[tuple[str, int, bool], Getter] = {}

    async def __aenter__(self) -> "Prober":  # noqa: PYI034  Self is 3.11
        return self

    async def __aexit__(self, *_: object) -> None:
        for getter in self._getters.values():
            getter.close()

    async def health(self, spec: ProcessSpec) -> Health:
        """Whether it answers that it is well."""
        path = "/livez" if spec.role is Role.PROXY else "/health"
        status, body = await self._get(spec, path)
        if status == 200:
            return Health(ok=True)
        if status is None:
            return Health(ok=False, reason=body, refused=body == NOT_YET)
        return Health(ok=False, reason=f"{path} says {status}", dead=status == 503)

    async def serves(self, spec: ProcessSpec, names: set[str]) -> Health:
        """Whether `/v1/models` names one of `names`: a stranger on our port would not."""
        status, body = await self._get(spec, "/v1/models")
        if status != 200:
            return Health(ok=False, reason=f"/v1/models says {status}" if status else body)
        try:
            rows: Any = msgspec.json.decode(body).get("data", [])
            found = {str(row.get(key)) for row in rows for key in ("id", "root")}
        except (msgspec.DecodeError, AttributeError, TypeError):
            return Health(ok=False, reason="/v1/models is not JSON: another server is on its port")
        if found & names:
            return Health(ok=True)
        served = ", ".join(sorted(found - {"None"})) or "nothing"
        return Health(ok=False, reason=f"serves {served}, not {min(names)}: another server is there")

    async def metrics(self, spec: ProcessSpec) -> str:
        """What it says at `/metrics`; empty when it says nothing."""
        status, body = await self._get(spec, "/metrics")
        return body if status == 200 else ""

    async def flush(self, spec: ProcessSpec, model: str, timeout_s: float) -> bool:
        """A one-token text request: the PD's step for it takes all that encoders have pushed so far."""
        body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=_headers(spec)) as session,
                session.post(spec.url + "/v1/chat/completions", json=body) as response,
            ):
                await response.read()
                return response.status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return False

    async def _get(self, spec: ProcessSpec, path: str) -> tuple[int | None, str]:
        where = (spec.host, spec.port, spec.url.startswith("https:"))
        getter = self._getters.get(where)
        if getter is None:
            getter = Getter(where[0], where[1], tls=where[2], ours=not spec.external)
            self._getters[where] = getter
        try:
            status, body = await getter.get(path, _headers(spec), self._timeout_s)
        except ConnectionRefusedError:
            return None, NOT_YET
        except asyncio.TimeoutError:
            return None, f"{path} did not answer within {self._timeout_s:g} s"
        except (OSError, EOFError, ValueError) as e:
            return None, f"{path}: {str(e) or type(e).__name__}"
        return status, body.decode(errors="replace")


def _headers(spec: ProcessSpec) -> dict[str, str]:
    key = spec.env.get("VLLM_API_KEY", os.environ.get("VLLM_API_KEY"))
    return {"Authorization": f"Bearer {key}"} if key else {}
