"""A proxy that runs alone, as the console's state: its members, its counts, its requests."""

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Literal
from urllib.parse import urlsplit

from eccon.model import (
    EVENTS_KEPT,
    TRACES_KEPT,
    Alarm,
    ClusterInfo,
    ClusterState,
    LogEvent,
    Process,
    Quantiles,
    Role,
    State,
)
from eccon_proxy.schema import EncoderInfo, PDInfo, ProxyState, Trace

__all__ = ["ProxyView"]

RATE_OVER_S = 10.0
TTFT_OF = 300
"""Newest answers that the first-byte figures are of."""
PD_STATES = {
    "ready": State.READY,
    "stalled": State.STALLED,
    "down": State.FAILED,
    "probing": State.STARTING,
}
BAD = ("ejected", "down", "stalled")


class ProxyView:
    """Takes what the admin API says, gives states. `name` is how the proxy is called on the screen."""

    def __init__(self, name: str, public_url: str = "") -> None:
        self.name = name
        self.public_url = public_url
        self.encoders: OrderedDict[str, EncoderInfo] = OrderedDict()
        self.pds: OrderedDict[str, PDInfo] = OrderedDict()
        self._proxy: ProxyState | None = None
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self._events: deque[LogEvent] = deque(maxlen=EVENTS_KEPT)
        self._counts: deque[tuple[float, int, int]] = deque(maxlen=64)
        self._seq = 0

    def take_state(self, state: ProxyState) -> None:
        """All members and counts anew."""
        for info in state.encoders:
            self.take_encoder(info)
        for pd in state.pds:
            self.take_pd(pd)
        for gone in self.encoders.keys() - {e.id for e in state.encoders}:
            del self.encoders[gone]
            self._log(gone, "left the proxy")
        for url in self.pds.keys() - {p.url for p in state.pds}:
            del self.pds[url]
        self._proxy = state
        self._count(state.requests)

    def take_encoder(self, info: EncoderInfo) -> None:
        """One encoder as it is now."""
        before = self.encoders.get(info.id)
        self.encoders[info.id] = info
        if before is not None and before.state != info.state:
            self._moved(info.id, before.state, info.state, info.reason)

    def take_pd(self, info: PDInfo) -> None:
        """One PD as it is now."""
        before = self.pds.get(info.url)
        self.pds[info.url] = info
        if before is not None and before.state != info.state:
            self._moved(self._pd_name(info), before.state, info.state, info.reason)

    def take_trace(self, trace: Trace) -> None:
        """One request, new or anew."""
        self._traces[trace.id] = trace
        while len(self._traces) > TRACES_KEPT:
            self._traces.popitem(last=False)

    def state(self) -> ClusterState:
        """What the console draws."""
        self._seq += 1
        processes = self._processes()
        health, reason = self._health()
        proxy = self._proxy
        return ClusterState(
            seq=self._seq,
            cluster=ClusterInfo(
                name=self.name,
                model=next((t.model for t in reversed(self._traces.values()) if t.model), ""),
                public_url=self.public_url,
                wanted=True,
                health=health,
                reason=reason,
                requests=proxy.requests if proxy else 0,
                inflight=sum(t.status == 0 for t in self._traces.values()),
                queued=proxy.queued if proxy else 0,
                requests_per_s=self._rate(1),
                items_per_s=self._rate(2),
                ttft=_ttft(self._traces.values()),
                can_add=False,
            ),
            processes=processes,
            traces=tuple(self._traces.values()),
            events=tuple(self._events),
            alarms=tuple(self._alarms()),
        )

    def _processes(self) -> tuple[Process, ...]:
        proxy = self._proxy
        out = [
            Process(
                name=self._pd_name(pd),
                role=Role.PD,
                state=PD_STATES[pd.state],
                reason=pd.reason,
                since=pd.since,
                started_at=pd.epoch,
                url=pd.url,
                port=_port(pd.url),
                pd=pd,
                external=True,
            )
            for pd in self.pds.values()
        ]
        out.append(
            Process(
                name="proxy",
                role=Role.PROXY,
                state=State.DRAINING if proxy is not None and proxy.draining else State.READY,
                since=proxy.started_at if proxy else 0.0,
                started_at=proxy.started_at if proxy else None,
                url=self.public_url,
                port=_port(self.public_url),
                external=True,
            )
        )
        # Whether an encoder serves is for the proxy to say: it does so in `encoder`.
        out += [
            Process(
                name=e.id,
                role=Role.ENCODER,
                state=State.READY,
                since=e.since,
                url=e.url,
                port=_port(e.url),
                encoder=e,
                external=True,
            )
            for e in self.encoders.values()
        ]
        return tuple(out)

    def _pd_name(self, pd: PDInfo) -> str:
        return "pd" if len(self.pds) <= 1 else f"pd-{list(self.pds).index(pd.url)}"

    def _health(self) -> tuple[Literal["ok", "degraded", "unavailable"], str]:
        bad = [f"{e.id} {e.state}" for e in self.encoders.values() if e.state != "ready"]
        pds = [f"{self._pd_name(p)} {p.state}" for p in self.pds.values() if p.state != "ready"]
        reason = ", ".join([*pds, *bad][:3])
        if len(pds) == len(self.pds):
            return "unavailable", reason or "no PD"
        if len(bad) == len(self.encoders):
            return "degraded", reason or "no encoder"
        return ("degraded" if bad or pds else "ok"), reason

    def _alarms(self) -> Iterable[Alarm]:
        for pd in self.pds.values():
            if pd.state in BAD:
                name = self._pd_name(pd)
                yield Alarm(
                    key=f"pd:{pd.url}",
                    subject=name,
                    text=pd.reason or pd.state,
                    since=pd.since,
                    severity="critical",
                )
        for e in self.encoders.values():
            if e.state in BAD:
                yield Alarm(key=f"encoder:{e.id}", subject=e.id, text=e.reason or e.state, since=e.since)

    def _moved(self, name: str, before: str, after: str, reason: str) -> None:
        why = f": {reason}" if reason else ""
        self._log(name, f"{before} → {after}{why}", "warning" if after in BAD else "info")

    def _log(self, subject: str, text: str, severity: Literal["info", "warning"] = "info") -> None:
        self._events.append(LogEvent(at=time.time(), subject=subject, text=text, severity=severity))

    def _count(self, requests: int) -> None:
        now = time.monotonic()
        items = sum(e.items for e in self.encoders.values())
        if self._counts and requests < self._counts[-1][1]:
            self._counts.clear()  # it was restarted, and counts from the beginning
        self._counts.append((now, requests, items))
        while len(self._counts) > 2 and self._counts[1][0] < now - RATE_OVER_S:
            self._counts.popleft()

    def _rate(self, of: Literal[1, 2]) -> float:
        if len(self._counts) < 2:
            return 0.0
        first, last = self._counts[0], self._counts[-1]
        return round(max(0, last[of] - first[of]) / max(last[0] - first[0], 0.001), 1)


def _port(url: str) -> int:
    try:
        return urlsplit(url).port or 0
    except ValueError:
        return 0


def _ttft(traces: Iterable[Trace]) -> Quantiles | None:
    known: Sequence[float] = sorted(t.ttft_s * 1000 for t in list(traces)[-TTFT_OF:] if t.ttft_s is not None)
    if not known:
        return None
    last = len(known) - 1
    return Quantiles(len(known), round(known[round(last * 0.5)], 1), round(known[round(last * 0.99)], 1))
