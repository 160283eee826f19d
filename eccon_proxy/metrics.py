"""Prometheus metrics under `eccon_proxy_*`: counters, histograms, and gauges read at the scrape.

Labels are bounded: routes are templates, outcomes and reasons are ours, encoders and PDs are members.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

__all__ = ["Counter", "Gauge", "Histogram", "Metrics"]

Labels = tuple[str, ...]
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


def _quote(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    return "{" + ",".join(f'{n}="{_quote(v)}"' for n, v in zip(names, values)) + "}"  # noqa: B905


class Counter:
    """A number that only grows, by label values."""

    kind = "counter"

    def __init__(self, name: str, text: str, labels: Labels = ()) -> None:
        self.name, self.text, self.labels = name, text, labels
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, *values: str, by: float = 1.0) -> None:
        """Count."""
        self._values[values] = self._values.get(values, 0.0) + by

    def get(self, *values: str) -> float:
        """The count of these label values."""
        return self._values.get(values, 0.0)

    def forget(self, value: str) -> None:
        """Drop the series of a member that left."""
        self._values = {k: v for k, v in self._values.items() if k[:1] != (value,)}

    def lines(self) -> Iterable[str]:
        """Its series."""
        return (f"{self.name}{_labels(self.labels, k)} {v:.15g}" for k, v in self._values.items())


class Gauge:
    """A number read when somebody asks."""

    kind = "gauge"

    def __init__(
        self, name: str, text: str, labels: Labels, read: Callable[[], Iterable[tuple[Labels, float]]]
    ) -> None:
        self.name, self.text, self.labels, self._read = name, text, labels, read

    def lines(self) -> Iterable[str]:
        """Its series."""
        return (f"{self.name}{_labels(self.labels, k)} {v:.15g}" for k, v in self._read())


class Histogram:
    """Seconds, in buckets."""

    kind = "histogram"

    def __init__(self, name: str, text: str, labels: Labels = ()) -> None:
        self.name, self.text, self.labels = name, text, labels
        self._series: dict[Labels, tuple[list[int], list[float]]] = {}

    def observe(self, seconds: float, *values: str) -> None:
        """Count one duration."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = ([0] * (len(_SECONDS) + 1), [0.0])
        series[0][bisect_left(_SECONDS, seconds)] += 1
        series[1][0] += seconds

    def forget(self, value: str) -> None:
        """Drop the series of a member that left."""
        self._series = {k: v for k, v in self._series.items() if k[:1] != (value,)}

    def lines(self) -> Iterable[str]:
        """Its series."""
        for values, (buckets, (total,)) in self._series.items():
            count = 0
            for bound, n in zip((*_SECONDS, "+Inf"), buckets):  # noqa: B905
                count += n
                labels = _labels((*self.labels, "le"), (*values, str(bound)))
                yield f"{self.name}_bucket{labels} {count}"
            labels = _labels(self.labels, values)
            yield f"{self.name}_sum{labels} {total:.9g}"
            yield f"{self.name}_count{labels} {count}"


class Metrics:
    """All of them."""

    def __init__(self) -> None:
        self._gauges: list[Gauge] = []
        self.requests = Counter("eccon_proxy_requests_total", "Requests answered.", ("route", "outcome"))
        self.seconds = Histogram(
            "eccon_proxy_request_seconds", "Request taken to answer complete.", ("route",)
        )
        self.ttft = Histogram(
            "eccon_proxy_ttft_seconds", "Request taken to first byte of the PD's answer.", ("route",)
        )
        self.encode_seconds = Histogram(
            "eccon_proxy_encode_seconds", "One item at an encoder, successes only.", ("encoder",)
        )
        self.encodes = Counter(
            "eccon_proxy_encodes_total", "Encode attempts by how they ended.", ("encoder", "outcome")
        )
        self.retries = Counter(
            "eccon_proxy_retries_total",
            "Requests sent again, by upstream and reason.",
            ("upstream", "reason"),
        )
        self.gate_wait = Histogram(
            "eccon_proxy_gate_wait_seconds", "Last item of a request encoded minus first item encoded."
        )
        self.encode_to_first_byte = Histogram(
            "eccon_proxy_encode_to_first_byte_seconds", "Last item encoded to first byte of the PD."
        )
        self.queue_wait = Histogram("eccon_proxy_queue_seconds", "Wait for room before encoding.")
        self.stalls = Counter("eccon_proxy_pd_stalls_total", "Times the PD was found stalled.")
        self.epochs = Counter("eccon_proxy_pd_epochs_total", "Lives of the PD that ended.")
        self.ejections = Counter("eccon_proxy_ejections_total", "Encoders ejected.", ("encoder",))
        self.orphans = Counter(
            "eccon_proxy_orphaned_encodes_total", "Items encoded for a request that did not use them."
        )
        self.refused = Counter("eccon_proxy_refused_total", "Requests refused by reason.", ("reason",))
        self.relay_bytes = Counter("eccon_proxy_relay_bytes_total", "Bytes of answers relayed.")
        self.body_bytes = Counter("eccon_proxy_body_bytes_total", "Bytes of request bodies taken.")

    def gauge(
        self, name: str, text: str, labels: Labels, read: Callable[[], Iterable[tuple[Labels, float]]]
    ) -> None:
        """Add a gauge."""
        self._gauges.append(Gauge(name, text, labels, read))

    def forget(self, encoder: str) -> None:
        """An encoder left: its series go."""
        for metric in (self.encode_seconds, self.encodes, self.ejections):
            metric.forget(encoder)

    def render(self) -> bytes:
        """The exposition in Prometheus' text format."""
        out: list[str] = []
        own = (m for m in vars(self).values() if isinstance(m, Counter | Histogram))
        for metric in (*own, *self._gauges):
            out += (f"# HELP {metric.name} {metric.text}", f"# TYPE {metric.name} {metric.kind}")
            out += metric.lines()
        out.append("")
        return "\n".join(out).encode()
