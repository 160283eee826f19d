"""Lines that go past Textual's compositor: the terminal shows what the compositor would have drawn."""

import time

import msgspec
import pytest

from eccon.model import ClusterChanged, ClusterState, ProcessChanged, TraceChanged
from tests.console import states
from tests.console.fake_daemon import FakeDaemon, running
from tests.console.terminal import Terminal, open_console

Cells = list[list[tuple[object, ...]]]


def shown(terminal: Terminal) -> Cells:
    """Every cell with its colours and attributes."""
    screen = terminal.screen
    return [[tuple(screen.buffer[y][x]) for x in range(screen.columns)] for y in range(screen.lines)]


def change(daemon: FakeDaemon, n: int) -> None:
    """A second in which all that the overview shows changes: table, charts, requests, health."""
    seq = daemon.state.seq + 1
    for p in daemon.state.processes:
        if p.encoder is not None:
            info = msgspec.structs.replace(p.encoder, items=p.encoder.items + 7 + n, inflight=n % 3)
            daemon.change(ProcessChanged(seq, msgspec.structs.replace(p, encoder=info, cpu_percent=20.0 * n)))
            seq += 1
    cluster = msgspec.structs.replace(
        daemon.state.cluster,
        requests_per_s=2.5 + n,
        items_per_s=20.0 + n,
        health="degraded" if n % 2 else "ok",
        reason="日本語 wide" if n % 2 else "",
    )
    daemon.change(ClusterChanged(seq, cluster))
    for i in range(3):
        trace = states.trace_of(5000 + 3 * n + i, states.NOW + n, images=i)
        daemon.change(TraceChanged(seq + 1 + i, msgspec.structs.replace(trace, id=f"new-{n}-{i}")))


def calm() -> ClusterState:
    """Nothing in it goes on by itself."""
    state = states.busy()
    return msgspec.structs.replace(state, traces=tuple(t for t in state.traces if t.status))


def rest(terminal: Terminal, daemon: FakeDaemon) -> None:
    """The last change: from here on only the minute changes what is drawn."""
    cluster = msgspec.structs.replace(
        daemon.state.cluster, requests_per_s=0.0, health="degraded", reason="at rest"
    )
    daemon.change(ClusterChanged(daemon.state.seq + 1, cluster))
    terminal.until("at rest")
    terminal.settle(1.0)  # titles come after the lines


def assert_same_when_drawn_anew(terminal: Terminal) -> None:
    for tries in (1, 0):
        before, minute = shown(terminal), int(time.time() // 60)
        sent = len(terminal.output)
        terminal.press("\x0c")  # all of it, by the compositor
        terminal.until(lambda sent=sent: len(terminal.output) > sent + 1000)  # type: ignore[misc]
        terminal.settle()
        if int(time.time() // 60) == minute or not tries:
            break
    assert ["".join(str(c[0]) for c in line) for line in shown(terminal)] == [
        "".join(str(c[0]) for c in line) for line in before
    ]
    assert shown(terminal) == before


@pytest.mark.parametrize(
    ("size", "env"),
    [
        ((160, 45), {}),
        ((80, 24), {"NO_COLOR": "1"}),
        ((120, 36), {"ECCON_ASCII": "1", "COLORTERM": ""}),
    ],
    ids=["wide", "no-colour", "ascii"],
)
def test_the_terminal_shows_what_the_compositor_would_have_drawn(
    size: tuple[int, int], env: dict[str, str]
) -> None:
    with running(calm()) as daemon, open_console(daemon.socket, size=size, env=env) as terminal:
        terminal.until(lambda: daemon.streams == 1)
        for n in (1, 2):
            change(daemon, n)
            terminal.until(f"new-{n}-2")
        rest(terminal, daemon)
        assert_same_when_drawn_anew(terminal)


def test_a_dialog_over_it_stays_whole_and_what_is_below_is_right_when_it_goes() -> None:
    with running(calm()) as daemon, open_console(daemon.socket, size=(160, 45)) as terminal:
        terminal.until(lambda: daemon.streams == 1)
        terminal.press("?")
        terminal.until("restart PD")
        terminal.settle()
        dialog = [line[50:70] for line in terminal.lines[12:30]]
        for n in (1, 2):
            change(daemon, n)
            terminal.settle(1.2)
        assert [line[50:70] for line in terminal.lines[12:30]] == dialog
        terminal.press("\x1b")
        terminal.until("new-2-2")
        rest(terminal, daemon)
        assert_same_when_drawn_anew(terminal)
