"""The proxy's state in one place, without a web framework: what routes, admin and server work on."""

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from eccon_proxy import __version__
from eccon_proxy.admission import Room
from eccon_proxy.encoders import Encoder
from eccon_proxy.errors import Failure
from eccon_proxy.events import Feed
from eccon_proxy.exchange import Exchange
from eccon_proxy.fanout import Services
from eccon_proxy.group import Group
from eccon_proxy.headers import Keys
from eccon_proxy.identity import Identity
from eccon_proxy.log import RequestLog, logger
from eccon_proxy.memberfile import listed
from eccon_proxy.metrics import Labels, Metrics
from eccon_proxy.otlp import Exporter
from eccon_proxy.pd import PD
from eccon_proxy.probes import Prober
from eccon_proxy.schema import ProxyState
from eccon_proxy.settings import Settings, admin_address, groups, listens_at
from eccon_proxy.trace import Recorder, Traces
from eccon_proxy.weights import Weights

__all__ = ["Core"]

if TYPE_CHECKING:
    from eccon_proxy.inline import Inliner

COUNTS_EVERY = 0.25
"""Seconds between two events about one encoder's counts."""
LOG_EVERY = 0.2


def _inliner(settings: Settings) -> "Inliner | None":
    if not settings.inline_media:
        return None
    from eccon_proxy.inline import Inliner  # noqa: PLC0415  aiohttp is loaded by nothing else

    return Inliner(settings)


class Core:
    """Everything that lives as long as the proxy."""

    def __init__(self, settings: Settings, address: tuple[str | int, ...] | None = None) -> None:
        self.settings = settings
        self._address = address or (settings.host, settings.port)
        self._admin = admin_address(settings)
        self.encode_kinds = frozenset(settings.encode_kinds)
        self.started_at = time.time()
        self.metrics = Metrics()
        self.feed = Feed()
        self.traces = Traces(settings.trace_bytes, self._trace_changed)
        self.log = RequestLog(settings.log_format)
        self.keys = Keys(settings)
        self.prober = Prober(settings, self.metrics)
        identity, weights = Identity(settings), Weights(settings.policy)
        self.services = Services(settings, self.metrics, identity, weights, self.prober.acquit)
        self.inliner = _inliner(settings)
        self.exporter = Exporter(settings.otlp_endpoint) if settings.otlp_endpoint else None
        self.room = Room(settings.max_inflight)
        self.exchanges: set[Exchange] = set()
        self.draining = False
        self.requests = 0
        self.pds: list[PD] = []
        self.encoders: dict[str, Encoder] = {}
        self.from_file: set[str] = set()
        """URLs of encoders that `--encoders-file` named last."""
        if settings.encoders_file:
            self.from_file = set(listed(settings.encoders_file, settings.decode_servers_urls))
        self.from_flags = frozenset(settings.encode_servers_urls) - self.from_file
        self._turn = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._dirty: set[Encoder] = set()
        self._states: dict[str, str] = {}
        self._gauges()

    async def start(self) -> None:
        """Take in the members that the settings name and begin to probe."""
        loop = asyncio.get_running_loop()
        number = 0
        for named in groups(self.settings):
            group = Group(self.settings)
            pd = PD(named.pd, group, self.settings, self.metrics, self._pd_changed)
            self.pds.append(pd)
            for url in named.encoders:
                number = self.settings.encode_servers_urls.index(url)
                self.join(f"encoder-{number}", url, pd)
        for pd in self.pds:
            self._tasks.append(loop.create_task(pd.watch()))
        self._tasks.append(loop.create_task(self._tick()))

    async def close(self, *, hurry: bool = False) -> None:
        """End every task and connection; in a `hurry` without waiting for anybody else."""
        await self.prober.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pd in self.pds:
            pd.close()
        for encoder in self.encoders.values():
            encoder.close()
        if self.inliner is not None:
            await self.inliner.close()
        if self.exporter is not None:
            await asyncio.to_thread(self.exporter.close, hurry=hurry)
        if self.log.waiting:
            self.log.flush()

    # members

    def join(self, encoder_id: str, url: str, pd: PD) -> Encoder:
        """Take an encoder in; it gets work once it has answered a probe."""
        encoder = Encoder(encoder_id, url, pd.group, self.settings, self._encoder_changed)
        self.encoders[encoder_id] = encoder
        pd.group.add(encoder)
        encoder.settle()
        self.metrics.ejections.add(encoder_id, by=0.0)
        self.prober.watch(encoder)
        return encoder

    def leave(self, encoder: Encoder) -> None:
        """Let an encoder go, at once; what is under way there is sent elsewhere."""
        encoder.leaving = encoder.drained = True
        encoder.settle("removed")
        for visit in tuple(encoder.inflight):
            visit.evict("the encoder was removed")
        encoder.lose()
        self.prober.forget(encoder)
        self.encoders.pop(encoder.id, None)
        self._states.pop(encoder.id, None)
        encoder.group.remove(encoder)
        encoder.close()
        self.metrics.forget(encoder.id)
        self.feed.publish("state", self.state())

    def pd_of(self, encoder: Encoder) -> PD:
        """The PD that an encoder pushes to."""
        return next(pd for pd in self.pds if pd.group is encoder.group)

    async def pick_pd(self, *, media: bool) -> PD:
        """The PD for the next request: one that answers, the least busy, in turn among equals."""
        pds = self.pds
        if len(pds) > 1:
            self._turn += 1
            order = [pds[(self._turn + i) % len(pds)] for i in range(len(pds))]
            ready = [pd for pd in order if pd.state in {"ready", "probing"}]
            if media:
                ready = [pd for pd in ready if pd.group.possible()] or ready
            pd = min(ready or order, key=lambda p: len(p.forwards))
        else:
            pd = pds[0]
        if pd.state == "probing":
            await pd.check()
        pd.refuse_if_away()
        return pd

    def is_own(self, url: str) -> bool:
        """Whether this proxy itself, or its admin API, is reached under a normal URL."""
        return any(listens_at(str(a[0]), int(a[1]), url) for a in (self._address, self._admin) if a)

    def free_id(self) -> str:
        """The first `encoder-N` that no member has."""
        return next(f"encoder-{n}" for n in itertools.count() if f"encoder-{n}" not in self.encoders)

    # what is told

    def state(self) -> ProxyState:
        """A snapshot for the admin API."""
        return ProxyState(
            version=__version__,
            started_at=self.started_at,
            draining=self.draining,
            encoders=tuple(e.info() for e in self.encoders.values()),
            pds=tuple(pd.info() for pd in self.pds),
            requests=self.requests,
            inflight=len(self.exchanges),
            queued=self.room.waiting + sum(pd.room.waiting for pd in self.pds),
            seq=self.feed.seq,
        )

    def finished(self, recorder: Recorder) -> None:
        """A request has ended."""
        self.requests += 1
        m = self.metrics
        m.requests.add(recorder.route, recorder.outcome)
        if recorder.total is not None and recorder.outcome == "ok":
            m.seconds.observe(recorder.total, recorder.route)
        if recorder.first_byte is not None:
            m.ttft.observe(recorder.first_byte - recorder.start, recorder.route)
        self.traces.finish(recorder)
        if self.exporter is not None and recorder.root is not None:
            self.exporter.export(recorder.snapshot(), recorder.root)
        self.log.add(recorder)

    def begin_drain(self) -> None:
        """Say that the proxy is about to end; requests are still taken."""
        self.draining = True
        self.feed.publish("state", self.state())

    def stop_requests(self, failure: Failure) -> None:
        """End every request under way with an error."""
        for exchange in tuple(self.exchanges):
            exchange.stop(failure)

    def _trace_changed(self, recorder: Recorder) -> None:
        self.feed.publish("trace", recorder)

    def _pd_changed(self, pd: PD) -> None:
        say = logger.info if pd.state == "ready" else logger.warning
        say("PD %s: %s %s", pd.url, pd.state, pd.reason or f"(process started at {pd.epoch})")
        self.feed.publish("pd", pd.info())
        pd.group.pd_ready = pd.state == "ready"
        pd.group.changed()

    def _encoder_changed(self, encoder: Encoder) -> None:
        state = encoder.state + encoder.reason
        told = self._states.get(encoder.id)
        if told != state:
            if told is None or not told.startswith(encoder.state):
                say = logger.warning if encoder.state in {"down", "ejected"} else logger.info
                say("%s (%s): %s %s", encoder.id, encoder.url, encoder.state, encoder.reason)
            self._states[encoder.id] = state
            self.feed.publish("encoder", encoder.info())
        elif self.feed.watched:
            self._dirty.add(encoder)

    async def _tick(self) -> None:
        """What is told in batches: counts to those who watch, lines to the log."""
        while True:
            await asyncio.sleep(COUNTS_EVERY)
            if self._dirty:
                dirty, self._dirty = self._dirty, set()
                for encoder in dirty:
                    if encoder.id in self.encoders:
                        self.feed.publish("encoder", encoder.info())
            if self.log.waiting:
                self.log.flush()

    def _gauges(self) -> None:
        gauge = self.metrics.gauge

        def per_encoder(read: str) -> Iterable[tuple[Labels, float]]:
            for e in self.encoders.values():
                value = len(e.inflight) if read == "inflight" else e.held() if read == "staged" else e.open
                yield (e.id,), float(value)

        gauge("eccon_proxy_inflight_requests", "Requests under way.", (), lambda: [((), len(self.exchanges))])
        gauge(
            "eccon_proxy_inflight_encodes",
            "Items being encoded.",
            ("encoder",),
            lambda: per_encoder("inflight"),
        )
        gauge(
            "eccon_proxy_inflight_pd", "Requests at the PD.", ("pd",),
            lambda: [((pd.url,), len(pd.forwards)) for pd in self.pds],
        )  # fmt: skip
        gauge(
            "eccon_proxy_inflight_pd_items", "Items whose requests the PD has not begun to answer.", ("pd",),
            lambda: [((pd.url,), pd.room.taken) for pd in self.pds],
        )  # fmt: skip
        gauge(
            "eccon_proxy_staged_items", "Items encoded and not consumed.", ("encoder",),
            lambda: per_encoder("staged"),
        )  # fmt: skip
        gauge("eccon_proxy_encoder_ready", "1 when it gets items.", ("encoder",), lambda: per_encoder("open"))
        gauge(
            "eccon_proxy_queued_requests", "Requests that wait for room.", (),
            lambda: [((), self.room.waiting + sum(pd.room.waiting for pd in self.pds))],
        )  # fmt: skip
        gauge(
            "eccon_proxy_pd_up", "1 when the PD answers.", ("pd",),
            lambda: [((pd.url,), float(pd.state == "ready")) for pd in self.pds],
        )  # fmt: skip
        gauge(
            "eccon_proxy_pd_epoch_seconds", "Start time of the PD's process.", ("pd",),
            lambda: [((pd.url,), pd.epoch) for pd in self.pds if pd.epoch is not None],
        )  # fmt: skip
