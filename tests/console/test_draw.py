"""Drawing is a pure function: every line has exactly the width asked for, whatever is in the state."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eccon.console import costs, export, logtext
from eccon.console.draw import charts, detail, events, figures, flow, header, processes, traces, waterfall
from eccon.console.draw.text import Line, cell_len, clean, fit, fit_line, line_width, plain, wrap
from eccon.console.history import History
from eccon.console.widgets.logview import pattern_of
from eccon.model import ClusterInfo, ClusterState, Exit
from eccon_proxy.schema import EncoderInfo
from tests.console import states

NOW = states.NOW
STATES = {
    f.__name__: f() for f in (states.busy, states.degraded, states.starting, states.hostile, states.on_npus)
}
WIDTHS = (1, 2, 8, 20, 39, 40, 60, 80, 100, 120, 160, 200)


def history_of(state: ClusterState) -> History:
    history = History()
    for n in range(200):
        history.feed(state, NOW - 400 + 2 * n)
    return history


def all_lines(state: ClusterState, width: int) -> list[Line]:
    history = history_of(state)
    lines = [header.header(state, width, NOW), *header.headers(state, width, NOW)]
    heading, rows = processes.table(state, width, NOW, history.rates())
    lines += [fit_line(line, width) for line in (heading, *(line for _, line in rows))]
    layout = traces.Layout(width, NOW)
    lines += [fit_line(line, width) for line in (layout.heading, *map(layout.line, state.traces))]
    lines += [events.event(e, width) for e in state.events]
    lines += [events.alarm(a, width, NOW, {"restart": "r"}) for a in state.alarms]
    lines += flow.flow(state, width)
    for trace in state.traces:
        lines += waterfall.head(trace, width, NOW)
        lines += [line for _, line in waterfall.span_lines(trace, width, NOW)]
    lines += [fit_line(line, width) for line in flow.fanout(state, history, width, 3, 300)]
    lines += charts.grid(state, history, width, 20, 300)
    for process in state.processes:
        more = detail.detail(state, process, history, width, NOW, 300)
        lines += [fit_line(line, width) for line in more]
    return lines


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("width", WIDTHS)
def test_lines_have_the_width_asked_for(name: str, width: int) -> None:
    for line in all_lines(STATES[name], width):
        assert line_width(line) == width, plain(line)


@pytest.mark.parametrize("name", STATES)
def test_nothing_drawn_can_command_the_terminal(name: str) -> None:
    text = "".join(plain(line) for line in all_lines(STATES[name], 120))
    assert not re.search("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\ud800-\udfff]", text)


@given(st.text(alphabet=st.characters()), st.integers(0, 60))
def test_any_text_is_fitted_to_the_cell(text: str, width: int) -> None:
    cleaned = clean(text)
    assert not re.search("[\x00-\x1f\x7f-\x9f\ud800-\udfff]", cleaned)
    assert cell_len(fit(cleaned, width)) == width
    assert cell_len(fit(cleaned, width, True)) == width
    if width > 1:
        assert all(cell_len(piece) <= width for piece in wrap(cleaned, width))
        assert "".join(wrap(cleaned, width)).replace(" ", "") == cleaned.replace(" ", "")


def test_a_lone_surrogate_and_escapes_are_made_visible() -> None:
    assert clean("a\ud83d\x1b[2J\tb\n") == "a�␛[2J    b␊"
    assert clean("👩‍👩‍👧 ⚠️") == "👩👩👧 ⚠"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (3599, "59m"),
        (7380, "2h03m"),
        (90061, "1d01h"),
        (9e6, "104d"),
        (None, "–"),
    ],
)
def test_uptime(value: float | None, text: str) -> None:
    assert figures.uptime(value) == text


def test_figures_keep_their_width() -> None:
    assert max(len(figures.percent(p)) for p in (0.0, 99.4, 100.0, 212.0, 1600.0)) <= 5
    assert max(len(figures.gib(int(n))) for n in (1, 2e8, 1e9, 6.6e9, 99e9, 4e11)) <= 5
    assert max(len(figures.seconds(s)) for s in (0.0, 0.001, 9.994, 9.996, 99.9, 340.0, 9999.0)) <= 4
    assert figures.pair_ms(12.0, 31.4) == "12/31 ms"
    assert figures.pair_ms(800.0, 1400.0) == "0.8/1.4 s"
    assert figures.percent(212.0) == "210%"  # steps of 5: noise is not redrawn


def test_the_table_names_what_matters_at_every_width() -> None:
    state = STATES["degraded"]
    for width in (40, 80, 200):
        _, rows = processes.table(state, width, NOW, {})
        text = {name: plain(line) for name, line in rows}
        assert "stalled" in text["encoder-3"]
        assert "▲" in text["encoder-3"]
        assert "encoder-3" in text["encoder-3"]
    assert "62%" in text["encoder-4"]
    assert "again in 8 s" in text["encoder-5"]


def test_a_filter_finds_by_words_and_by_slowness() -> None:
    trace = states.trace_of(1, NOW)
    assert traces.matches(trace, "200 encoder-1")
    assert traces.matches(trace, ">4")
    assert not traces.matches(trace, ">4.2")
    assert not traces.matches(trace, ">x")
    assert processes.matches(STATES["degraded"].processes[5], "stalled ENCODER-3")


def test_the_waterfall_has_a_row_for_every_item_and_attempt() -> None:
    trace = next(t for t in STATES["busy"].traces if t.id == "req-beef")
    rows = waterfall.rows(trace)
    assert [(r.label, r.who) for r in rows] == [
        ("queue", ""),
        ("image 1", "encoder-0"),
        ("image 2", "encoder-3"),
        ("", "encoder-2"),
        ("gate", "slowest: 2"),
        ("PD", ""),
        ("stream", ""),
    ]
    assert "timed out after 1.00 s" in rows[2].note
    assert rows[3].took == ("900 ms", "10 ms", "190 ms", "10 ms", "20 ms")
    lines = [plain(line) for _, line in waterfall.span_lines(trace, 120, NOW)]
    for name, took in zip(("encode", "push", "wait", "pull"), rows[3].took, strict=False):
        end = lines[0].index(name) + len(name)
        assert lines[4][:end].endswith(took)  # below its heading, whole
    narrow = [plain(line) for _, line in waterfall.span_lines(trace, 80, NOW)]
    assert narrow[4].rstrip().endswith("20 ms")
    assert narrow[0].split()[-1] == "transfer"
    assert lines[2].index("━") < lines[4].index("━")  # the second attempt begins later
    assert "╳" in lines[3]


def test_an_unfinished_request_reaches_the_present() -> None:
    trace = next(t for t in STATES["busy"].traces if t.id == "req-7f40")
    lines = [plain(line) for _, line in waterfall.span_lines(trace, 100, NOW)]
    assert "▸" in lines[3]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_that_a_console_may_only_look_is_seen_at_any_width(width: int) -> None:
    state = STATES["busy"]
    info = msgspec.structs.replace(state.cluster, public_url=f"http://{'proxy.' * 12}example:19000")
    state = msgspec.structs.replace(state, cluster=info)
    for line in (
        header.header(state, width, NOW, "", "read-only"),
        header.headers(state, width, NOW, "", "read-only")[0],
    ):
        assert " read-only " in plain(line)


@pytest.mark.parametrize("width", [146, 158, 198])
def test_the_last_error_has_room_beside_the_npus(width: int) -> None:
    state = STATES["on_npus"]
    died = msgspec.structs.replace(state.processes[2], exit=Exit(at=NOW - 240, signal=9))
    state = msgspec.structs.replace(state, processes=(*state.processes[:2], died, *state.processes[3:]))
    heading, rows = processes.table(state, width, NOW, {})
    assert all(word in plain(heading) for word in ("npu%", "nmem", "temp", "pst", "pid", "last error"))
    assert "killed by" in plain(rows[2][1])
    assert max(line_width(line) for _, line in rows) <= width


def test_the_last_error_of_one_that_is_well_again_is_kept() -> None:
    state = STATES["busy"]
    died = msgspec.structs.replace(state.processes[2], exit=Exit(at=NOW - 240, signal=9))
    asked = msgspec.structs.replace(state.processes[3], exit=Exit(at=NOW - 240, signal=9, asked=True))
    state = msgspec.structs.replace(state, processes=(died, asked))
    heading, rows = processes.table(state, 200, NOW, {})
    assert "last error" in plain(heading)
    assert plain(rows[0][1]).rstrip().endswith("killed by signal 9 4m ago")
    assert "signal" not in plain(rows[1][1])


def test_costs_name_what_is_lost() -> None:
    state = STATES["degraded"]
    title, lines = costs.question("restart", state, state.process("encoder-0"))
    assert title == "Restart encoder-0?"
    assert "1 item staged" in " ".join(lines)
    assert "PD keeps serving; 2 encoders remain" in lines
    _, lines = costs.question("kill", state, state.process("encoder-0"))
    assert any("may exit" in line for line in lines)
    idle = states.encoder(7, encoder=EncoderInfo(id="encoder-7", url="http://127.0.0.1:19108", state="ready"))
    for action in ("kill", "drain"):
        _, lines = costs.question(action, state, idle)
        assert "Nothing is being encoded or staged there" in lines
    assert costs.scale(state, 7)[1] == ["There are 6; 1 more takes the next free device and port."]
    for action in ("add", "down", "roll", "reload"):
        title, lines = costs.question(action, state, None)
        assert title.endswith("?")
        assert lines


def test_exports() -> None:
    trace = next(t for t in STATES["busy"].traces if t.id == "req-beef")
    events_ = export.chrome_events(trace)
    assert {e["name"] for e in events_} >= {"encode", "push", "pull", "gate", "pd", "stream"}
    assert all(e["dur"] >= 0 for e in events_)
    line = export.curl(trace, "http://127.0.0.1:19000/")
    assert line.startswith("curl -sS http://127.0.0.1:19000/v1/chat/completions ")
    assert '"stream": true' in line


def test_log_lines_keep_colours_and_show_the_rest() -> None:
    line = logtext.parse("\x1b[31mred\x1b[0m [/] \x1b]52;c;aGk=\x07")
    assert line == [("red", "bad"), (" [/] ␛]52;c;aGk=␇", "text")]
    assert logtext.parse("WARNING 11-29 careful") == [("WARNING 11-29 careful", "warn")]
    assert "70000 more characters" in plain(logtext.parse("x" * 90_000))
    assert [logtext.level_of(t) for t in ("(EngineCore pid=3) [vllm-rbln] ERROR x", "INFO: y", "z")] == [
        3,
        1,
        0,
    ]


def test_a_search_is_literal_unless_between_slashes() -> None:
    assert pattern_of("a.c") is not None
    literal, regular = pattern_of("a.c"), pattern_of("/a.c/")
    assert literal is not None
    assert regular is not None
    assert not literal.search("abc")
    assert regular.search("ABC")
    with pytest.raises(re.error):
        pattern_of("/(/")


def test_history_makes_rates_and_charts() -> None:
    history = History()
    state = states.busy(2)
    for n in range(60):
        changed = tuple(
            p
            if p.encoder is None
            else msgspec.structs.replace(p, encoder=msgspec.structs.replace(p.encoder, items=10 * n))
            for p in state.processes
        )
        history.feed(msgspec.structs.replace(state, processes=changed), NOW + n)
    assert history.rate("encoder-0") == pytest.approx(10.0)
    assert history.get("items:encoder-0").last(5) == pytest.approx([10.0] * 5)
    lines = flow.chart(history, (("transfer", "bar"), ("transfer99", "frame")), 40, 3, 60)
    assert [line_width(line) for line in lines] == [40, 40, 40]
    assert plain(lines[0]).lstrip().startswith("50")  # 33 ms on a scale of 50
    history.feed(msgspec.structs.replace(state, processes=()), NOW + 61)
    assert not history.rates()


def test_points_of_a_chart_stay_as_time_goes_on() -> None:
    history = History()
    state = states.busy(1)
    seen: list[list[float]] = []
    for n in range(40):
        info = msgspec.structs.replace(state.cluster, requests_per_s=float(n))
        history.feed(msgspec.structs.replace(state, cluster=info), NOW + 2 * n)
        seen.append(history.get("requests").last(8, 4))
    assert seen[-1][:-2] == seen[-5][1:-1]


def test_the_window_of_a_large_cluster_is_drawn_quickly() -> None:
    state = states.many(64, 1000)
    _, rows = processes.table(state, 160, NOW, {})
    assert len(rows) == 66


def test_details_name_devices_counts_steps_and_environment() -> None:
    state = states.on_npus()
    process = state.process("encoder-1")
    assert process is not None
    lines = [plain(line) for line in detail.detail(state, process, History(), 120, NOW, 300)]
    text = "\n".join(lines)
    for wanted in ("rbln9", "throttled by heat", "VLLM::EngineCore", "18.1 W", "5.6G/15.7G", "3.0G"):
        assert wanted in text
    assert "1,210 pushed, 1,204 acknowledged, 2 evicted" in text
    assert [line.split()[-1] for line in lines if " s  " in line and "━" in line] == [
        "imports",
        "weights",
        "ready",
    ]
    assert "VLLM_API_KEY=•••" in text
    pd = state.process("pd")
    assert pd is not None
    text = "\n".join(plain(line) for line in detail.detail(state, pd, History(), 120, NOW, 300))
    assert "4,800 received, 4,790 pulled" in text


@pytest.mark.parametrize("known", [False, True])
def test_details_tell_how_well_a_process_is_guarded(known: bool) -> None:
    state = states.on_npus()
    state = msgspec.structs.replace(
        state, cluster=msgspec.structs.replace(state.cluster, lost_guard_events=1234)
    )
    pd, encoder = state.process("pd"), state.process("encoder-1")
    assert pd is not None
    assert encoder is not None
    for process, level, words in (
        (pd, "wrap", "guard        on, by wrapping the scheduler"),
        (pd, "off", "guard        off: an encoder that crashes"),
        (encoder, "hooks", "guard        partly"),
        (encoder, "vendor", "guard        off: the guard found a version"),
    ):
        told = msgspec.structs.replace(process, guard=level)
        if not known:  # by the proxy
            told = msgspec.structs.replace(told, pd=None, encoder=None)
        text = "\n".join(plain(line) for line in detail.detail(state, told, History(), 120, NOW, 300))
        assert words in text
        assert ("1,234 events of the guards were lost" in text) == (known and process is pd)


def test_a_cluster_that_nothing_is_known_of_is_not_said_to_be_stopped() -> None:
    nothing = ClusterState(cluster=ClusterInfo(name="…"))
    for line in (header.header(nothing, 100, NOW), *header.headers(nothing, 100, NOW)):
        assert "stopped" not in plain(line)
        assert "0/0" not in plain(line)
    assert "connecting" in plain(header.header(nothing, 100, NOW))
    assert "no daemon" in plain(header.header(nothing, 100, NOW, lost="no daemon answers"))
