"""The app: holds the daemon's state, draws the screen at hand, and carries out the table of actions."""

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.events import Event, Key, Paste
from textual.screen import Screen
from textual.timer import Timer

from eccon.console import actions, notify, themes
from eccon.console.deeds import Deeds
from eccon.console.draw.flow import WINDOWS
from eccon.console.draw.text import Line, clean
from eccon.console.history import History
from eccon.console.opening import Opening
from eccon.console.past import Past
from eccon.console.screens.base import ConsoleScreen
from eccon.console.screens.dialogs import LineInput
from eccon.console.screens.overview import Overview
from eccon.console.setup import Setup, setup
from eccon.console.showing import Showing
from eccon.console.source import OF_RECORDINGS, Source
from eccon.model import Change, ClusterInfo, ClusterState, State, Trace

__all__ = ["ConsoleApp", "open_on"]

TICK_S, SLOW_TICK_S = 1.0, 3.0
"""The least time between two frames that nobody asked for with a key."""

LIVELY = {State.STARTING, State.LOADING, State.BACKOFF, State.DRAINING, State.STOPPING}
MESSAGE_S = 6.0


class ConsoleApp(Deeds, Showing):
    """Draws one cluster."""

    CSS_PATH = "styles.tcss"
    TITLE = "eccon"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "interrupt", show=False, priority=True, system=True),
        Binding("ctrl+q", "act('quit')", show=False, priority=True),
    ]

    def __init__(
        self,
        socket: Path,
        *,
        on_quit_ask: bool = True,
        read_only: bool = False,
        theme: str | None = None,
        environ: dict[str, str] | None = None,
        source: Callable[[], Source] | None = None,
        ready: Setup | None = None,
        opening: Opening | None = None,
    ) -> None:
        """`source` makes what is drawn instead of the daemon behind `socket`.

        `ready` is what was read already, `opening` the first frame, where it is on the terminal.
        """
        environ = dict(os.environ) if environ is None else environ
        ready = setup(theme, environ) if ready is None else ready
        super().__init__(ready, opening, environ)
        self.environ = environ
        self.settings = ready.settings
        self.previews = self.settings.images != "off" and not (self._own_filters or self.low_bandwidth)
        """Whether images are shown in small: they are nothing without colours, and cost bytes."""
        self._problems = ready.problems
        self.set_keymap(self.settings.keys)
        self.socket = socket
        self.link: Source
        self._source = source
        self.now: Callable[[], float] = time.time
        """The time that the state is of."""
        self.on_quit_ask = on_quit_ask
        self.read_only = read_only
        self.bell_on = self.settings.bell
        self.notify_by = self.settings.notify
        self._in_tmux = bool(environ.get("TMUX"))
        self.state = ClusterState(cluster=ClusterInfo(name="…")) if opening is None else opening.state
        self.lost = ""
        self.history = History()
        if opening is not None:
            self.history.feed(opening.state, time.time())
        self.past = Past()
        self.window = WINDOWS[1]
        self.acknowledged: set[str] = set()
        self.message: Line = []
        self.prompts: list[Any] = []
        self._known_alarms: set[str] = set()
        self._message_timer: Timer | None = None
        self._frame_timer: Timer | None = None
        self._last_frame = 0.0
        self._next_tick: Timer | None = None

    # Life

    def get_default_screen(self) -> Screen[Any]:
        """The overview is the first screen, so that nothing else is painted before."""
        return Overview()

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        if not self.is_headless:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    loop.add_signal_handler(number, self.exit, None, 128 + number)
        if self.opening is not None:
            self.opening.release()
        self.app_resume_signal.subscribe(self, self._resumed)
        self.app_suspend_signal.subscribe(self, lambda _: None)
        self.theme_changed_signal.subscribe(self, self._themed)
        if self._problems:
            self.say("; ".join(self._problems), "warn", 15.0)
        self.call_after_refresh(self._connect)

    def _connect(self) -> None:
        """After the first paint: what talks to the daemon is imported and started."""
        gc.freeze()  # Textual and we are here to stay: the collector need not look at us again and again
        gc.enable()
        from eccon.console.link import Link  # noqa: PLC0415  only after something is on the screen

        self.link = self._source() if self._source is not None else Link(self.socket)
        self.now = self.link.now
        self.run_worker(self.link.watch(self), group="watch")

    def _resumed(self, _: object) -> None:
        self.painter.forget()
        if self.painter.easel is not None:
            self.painter.easel.gallery.forget()
        self.screen.refresh()

    def _themed(self, _: object) -> None:
        self.palette = themes.Palette(self.theme_files[self.theme])
        for screen in self.screen_stack:
            screen.refresh()
            for widget in screen.query("*"):
                widget.refresh()
        self.redraw()

    # State

    def take(self, item: ClusterState | Change) -> None:
        """A snapshot or a change from the daemon."""
        before = self.state
        self.state = item if isinstance(item, ClusterState) else before.apply(item)
        self.past.note(before, self.state)
        self._alarm()
        self.changed()

    def connection(self, lost: str) -> None:
        """Says whether the daemon answers; the last state stays, greyed."""
        if lost and not self.link.flag:
            lost = f"daemon lost: {lost}"
        if lost == self.lost:
            return
        self.lost = lost
        if self.faded != bool(lost):
            self.faded = bool(lost)
            for widget in self.screen.query("Lines"):
                widget.refresh()
        self.redraw()

    def _alarm(self) -> None:
        """Bell and notification for what is new; what was there when the console came is not."""
        keys = {a.key for a in self.state.alarms}
        fresh = [a for a in self.state.alarms if a.key not in self._known_alarms]
        if fresh and self.bell_on:
            self.bell()
        if fresh and self.notify_by != "off" and self._driver is not None and not self.is_headless:
            text = "; ".join(f"{a.subject}: {a.text}" for a in fresh[:3])
            title = f"eccon {self.state.cluster.name}"
            self._driver.write(notify.sequence(self.notify_by, title, text, tmux=self._in_tmux))
        self._known_alarms = keys
        self.acknowledged &= keys

    def changed(self) -> None:
        """Draws soon: at most so often that a busy cluster costs few bytes."""
        if self._frame_timer is None:
            since = time.monotonic() - self._last_frame
            least = SLOW_TICK_S if self.low_bandwidth else TICK_S
            self._frame_timer = self.set_timer(max(0.02, least - since), self._frame)

    def _frame(self) -> None:
        self._frame_timer = None
        self._last_frame = time.monotonic()
        self.history.feed(self.state, self.now())
        self.past.pack()
        self.redraw()

    def redraw(self) -> None:
        """Draws the screen at hand now; lines that stay the same cost nothing."""
        with self.batch_update():
            for screen in reversed(self.screen_stack):  # dialogs lie over a screen that still shows
                if isinstance(screen, ConsoleScreen):
                    self.draw_screen(screen)
                    break
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        """Figures that grow by themselves: each second while something is under way, else with the minute."""
        if self._next_tick is not None:
            self._next_tick.stop()
        now = self.now()
        state = self.state
        lively = not self.lost and (
            any(p.state in LIVELY or (p.started_at or 0) > now - 60 for p in state.processes)
            or any(t.status == 0 for t in state.traces[-50:])
            or any(a.since > now - 60 for a in state.alarms)
            or state.cluster.requests_per_s > 0
        )
        wait = (SLOW_TICK_S if self.low_bandwidth else 1.0) if lively else 60.0 - now % 60 + 0.01
        self._next_tick = self.set_timer(wait, self._frame)

    @property
    def flag(self) -> str:
        """What the header says of this console: where its state comes from, and whether it may act."""
        of_source = self.link.flag if hasattr(self, "link") else ""
        return "  ".join(word for word in (of_source, "read-only" if self.read_only else "") if word)

    @property
    def log_tick_s(self) -> float:
        """Time between two frames of a log that grows."""
        return SLOW_TICK_S if self.low_bandwidth else TICK_S

    # Actions

    async def on_event(self, event: Event) -> None:
        """A key of a full screen, or in a field, is acted on before the next one is looked at.

        Textual hands all that wait to the widget with the focus first, so what is typed ahead, or comes in
        one piece over a slow link, would miss the dialog or the field that the first key leads to.
        """
        if isinstance(event, Key) and self._exit:
            return  # the end that was asked for waits behind all keys typed ahead
        if isinstance(event, Key) and not event.is_forwarded:
            field = self.focused
            if isinstance(self.screen, ConsoleScreen) and self.screen.keep(event):
                return
            if isinstance(field, LineInput) and event.is_printable:
                await field.take(event)
                return
            if isinstance(field, LineInput) or isinstance(self.screen, ConsoleScreen):
                for priority in (True, False):
                    if await self._check_bindings(event.key, priority=priority):
                        return
        elif isinstance(event, Paste) and not event.is_forwarded and isinstance(self.focused, LineInput):
            self.focused.take_paste(event)
            return
        await super().on_event(event)

    def action_act(self, name: str) -> None:
        """Carries out the action of that name (bindings point here)."""
        self.act(name)

    def act(self, name: str) -> None:
        """Finds the action's handler at the screen, then here, and calls it."""
        action = actions.by_name(name)
        if action.mutates and self.read_only:
            self.say(f"{action.title}: this console is read-only", "warn")
            return
        handler = getattr(self.screen, f"act_{name}", None) or getattr(self, f"act_{name}", None)
        if handler is not None:
            handler()

    def offered(self, table: Iterable[actions.Action]) -> list[actions.Action]:
        """Those of the actions that mean something in this console, and are allowed."""
        lacks = self.link.lacks if hasattr(self, "link") else OF_RECORDINGS
        return [a for a in table if a.name not in lacks and not (a.mutates and self.read_only)]

    def say(self, text: str, tone: str = "text", seconds: float = MESSAGE_S) -> None:
        """Shows a message in the place of the footer for a while."""
        self.message = [(clean(text), tone)] if text else []
        if self._message_timer is not None:
            self._message_timer.stop()
        self._message_timer = self.set_timer(seconds, self._unsay) if text else None
        self.redraw()

    def _unsay(self) -> None:
        self._message_timer = None
        self.message = []
        self.redraw()

    def next_window(self) -> None:
        """The next span of the charts."""
        self.window = WINDOWS[(WINDOWS.index(self.window) + 1) % len(WINDOWS)]
        self.say(f"charts span {self.window // 60} min")

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette's entries: the actions of the screen at hand."""
        scope = screen.SCOPE if isinstance(screen, ConsoleScreen) else "overview"
        for action in self.offered(actions.in_scope(scope)):
            key = actions.key_label(action, self.settings.keys)
            title = f"{action.title[:1].upper()}{action.title[1:]}"
            yield SystemCommand(title, f"{key:>6}  {action.tooltip}", lambda name=action.name: self.act(name))

    def handle_bindings_clash(self, clashed_bindings: set[Binding], node: Any) -> None:
        """Keys of the user that take away others are said when the settings are read."""

    def trace(self, trace_id: str, *, exact: bool = False) -> Trace | None:
        """The request of that id, or of an id that begins so (ids are made unique by a suffix)."""
        traces = self.state.traces
        found = next((t for t in reversed(traces) if t.id == trace_id), None) or self.past.find(trace_id)
        if found is None and not exact:
            found = next((t for t in reversed(traces) if t.id.startswith(trace_id)), None)
        return found


def open_on(
    socket: Path,
    *,
    on_quit_ask: bool,
    read_only: bool,
    ready: Setup,
    opening: Opening | None,
    source: Callable[[], Source] | None = None,
) -> int:
    """Runs the app until it ends; its exit code."""
    app = ConsoleApp(
        socket, on_quit_ask=on_quit_ask, read_only=read_only, source=source, ready=ready, opening=opening
    )
    try:
        app.run(mouse=app.settings.mouse)
    except KeyboardInterrupt:
        return 130
    with suppress(OSError, ValueError):
        os.sys.stderr.flush()  # type: ignore[attr-defined]
    return app.return_code or 0
