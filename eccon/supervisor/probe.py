"""Asks a process over HTTP whether it is up, and whether it is what we started."""

import asyncio
import os
from typing import Any

import aiohttp
import msgspec

from eccon.launch import ProcessSpec
from eccon.model import Role

__all__ = ["Health", "Prober"]


class Health(msgspec.Struct, frozen=True):
    """`ok`, or why not. `refused`: nothing listens yet; `dead`: it says itself that its engine is dead."""

    ok: bool
    reason: str = ""
    refused: bool = False
    dead: bool = False


class Prober:
    """Probes with one pooled session. vLLM closes idle connections after 5 s: ours idle less."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Prober":  # noqa: PYI034  Self is 3.11
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session:
            await self._session.close()

    async def health(self, spec: ProcessSpec) -> Health:
        """Whether it answers that it is well."""
        path = "/livez" if spec.role is Role.PROXY else "/health"
        status, body = await self._get(spec, path)
        if status == 200:
            return Health(ok=True)
        if status is None:
            return Health(ok=False, reason=body, refused=body == "nothing listens yet")
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

    async def flush(self, spec: ProcessSpec, model: str, timeout_s: float) -> bool:
        """A one-token text request: the PD's step for it takes all that encoders have pushed so far."""
        body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
        assert self._session is not None  # noqa: S101  entered
        try:
            async with self._session.post(
                spec.url + "/v1/chat/completions",
                json=body,
                headers=_headers(spec),
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                await response.read()
                return response.status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return False

    async def _get(self, spec: ProcessSpec, path: str) -> tuple[int | None, str]:
        assert self._session is not None  # noqa: S101  entered
        try:
            async with self._session.get(spec.url + path, headers=_headers(spec)) as response:
                raw = await response.content.read(1 << 16)
                return response.status, raw.decode(errors="replace")
        except aiohttp.ClientConnectorError:
            return None, "nothing listens yet"
        except asyncio.TimeoutError:
            return None, f"{path} did not answer within {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as e:
            return None, f"{path}: {str(e) or type(e).__name__}"


def _headers(spec: ProcessSpec) -> dict[str, str]:
    key = spec.env.get("VLLM_API_KEY", os.environ.get("VLLM_API_KEY"))
    return {"Authorization": f"Bearer {key}"} if key else {}
