"""Requests that fell out of the daemon's state are still there to look at."""

from pathlib import Path

import msgspec

from eccon.console.app import ConsoleApp
from eccon.console.past import ALL_KEPT, Past
from eccon.console.screens.trace import TraceScreen
from eccon.console.screens.traces import Traces
from eccon.console.widgets.lines import Lines
from eccon.model import TRACES_KEPT, ClusterInfo, ClusterState, TraceChanged
from tests.console import states


def test_what_falls_out_is_kept_small_whole_and_bounded() -> None:
    past = Past()
    state = ClusterState(cluster=ClusterInfo(name="a"))
    traces = [states.trace_of(n, states.NOW, images=n % 9) for n in range(50)]
    many = ALL_KEPT + 100
    for n in range(many):
        trace = msgspec.structs.replace(traces[n % 50], id=f"req-{n}")
        before, state = state, state.apply(TraceChanged(seq=n + 1, trace=trace))
        past.note(before, state)
        past.pack()
    assert len(state.traces) == TRACES_KEPT
    assert len(past) == ALL_KEPT - TRACES_KEPT
    assert past.find(f"req-{many - ALL_KEPT - 1}") is None
    assert past.find(f"req-{many - ALL_KEPT}") == msgspec.structs.replace(
        traces[(many - ALL_KEPT) % 50], id=f"req-{many - ALL_KEPT}"
    )
    assert past.newest_first()[0][0] == f"req-{many - TRACES_KEPT - 1}"


def test_one_that_is_heard_of_again_is_there_once_and_another_clusters_are_forgotten() -> None:
    past = Past()
    full = ClusterState(
        cluster=ClusterInfo(name="a"),
        traces=tuple(states.trace_of(n, states.NOW) for n in range(TRACES_KEPT)),
    )
    state = full.apply(TraceChanged(seq=1, trace=states.trace_of(5000, states.NOW)))
    past.note(full, state)
    fallen = full.traces[0]
    assert past.find(fallen.id) == fallen
    again = state.apply(TraceChanged(seq=2, trace=fallen))
    past.note(state, again)
    assert past.find(fallen.id) is None
    assert len(past) == 1  # the one that made room for it
    past.note(again, ClusterState(cluster=ClusterInfo(name="b")))
    assert len(past) == 0


async def test_the_list_goes_on_with_them_filtered_and_opened(tmp_path: Path) -> None:
    app = ConsoleApp(tmp_path / "none")
    async with app.run_test(size=(120, 30)) as pilot:
        app.take(ClusterState(cluster=ClusterInfo(name="a"), seq=1))
        for n in range(TRACES_KEPT + 40):
            app.take(TraceChanged(seq=n + 2, trace=states.trace_of(n, states.NOW)))
        app.act("traces")
        await pilot.pause()
        screen = app.screen
        assert isinstance(screen, Traces)
        screen.draw()
        assert f"{TRACES_KEPT + 40} of {TRACES_KEPT + 40}" in screen.query_one("#caption", Lines).text
        oldest = states.trace_of(0, states.NOW)
        screen.words = oldest.id
        screen.draw()
        assert screen.rows.keys[-1] == oldest.id
        screen.rows.choose(oldest.id)
        assert screen.chosen() == oldest
        app.act("open")
        await pilot.pause()
        assert isinstance(app.screen, TraceScreen)
        assert app.screen.trace() == oldest
