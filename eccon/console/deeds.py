"""What the actions do: open screens, ask, send requests to the daemon."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from textual.drivers.linux_driver import LinuxDriver
from textual.widgets import Input

from eccon.console import actions, costs, export
from eccon.console.draw.text import clean
from eccon.console.notify import Notify
from eccon.console.screens.base import ConsoleScreen
from eccon.console.screens.dialogs import AskLine, Choice, Help, Leave
from eccon.console.screens.steady import SteadySize
from eccon.console.source import Problem
from eccon.model import Process, Role, Trace

if TYPE_CHECKING:
    from eccon.console.app import ConsoleApp
    from eccon.console.replay import Replay

__all__ = ["Deeds"]

ENCODERS_MAX = 1024


class Deeds:
    """The app's part that acts. Handlers are `act_NAME`, one for each action that no screen handles."""

    @property
    def _app(self) -> "ConsoleApp":
        return cast("ConsoleApp", self)

    # Requests to the daemon

    def _chosen(self) -> Process | None:
        find = getattr(self._app.screen, "chosen_process", None)
        if find is not None:
            return cast("Process | None", find())
        return self._app.state.process(getattr(self._app.screen, "process_name", ""))

    def _with_process(self, action: str) -> None:
        app = self._app
        process = self._chosen()
        if process is None:
            app.say(f"{action}: no process is chosen", "warn")
            return
        if actions.by_name(action).target == "encoder" and process.role is not Role.ENCODER:
            app.say(f"{action}: {process.name} is no encoder", "warn")
            return
        if actions.by_name(action).ask:
            self._ask(action, process)
        else:
            self._send(action, process.name)

    def _ask(self, action: str, process: Process | None) -> None:
        title, lines = costs.question(action, self._app.state, process)
        name = process.name if process is not None else ""
        word = actions.by_name(action).title

        self._confirm(title, lines, word, lambda: self._send(action, name))

    def _confirm(self, title: str, lines: list[str], word: str, do: Callable[[], None]) -> None:
        """Asks; No is the default, and what escape means."""
        answers = [("n", "No", False), ("y", f"Yes, {word}", True)]
        self._app.push_screen(Choice(title, lines, answers), lambda yes: do() if yes else None)

    def _send(self, action: str, name: str) -> None:
        self._app.say(f"{actions.by_name(action).title} {name} …", "busy")
        self._app.run_worker(self._sent(action, name), group=f"do-{action}-{name}")

    async def _sent(self, action: str, name: str) -> bool:
        try:
            self._app.say(await self._app.link.do(action, name), "ok")
        except Problem as e:
            self._app.say(f"{actions.by_name(action).title}: {e}", "bad", 12.0)
            return False
        return True

    def act_restart(self) -> None:
        """Drains and restarts the chosen process."""
        self._with_process("restart")

    def act_stop(self) -> None:
        """Drains and stops the chosen process."""
        self._with_process("stop")

    def act_start(self) -> None:
        """Starts the chosen process."""
        self._with_process("start")

    def act_kill(self) -> None:
        """Stops the chosen process at once."""
        self._with_process("kill")

    def act_remove(self) -> None:
        """Takes the chosen encoder out of the cluster."""
        self._with_process("remove")

    def act_drain(self) -> None:
        """Gives the chosen encoder no more items."""
        self._with_process("drain")

    def act_resume(self) -> None:
        """Gives the chosen encoder items again."""
        self._with_process("resume")

    def act_add(self) -> None:
        """Adds an encoder."""
        self._ask("add", None)

    def act_up(self) -> None:
        """Starts everything."""
        self._send("up", "")

    def act_down(self) -> None:
        """Stops all servers."""
        self._ask("down", None)

    def act_roll(self) -> None:
        """Restarts all encoders in turn."""
        self._ask("roll", None)

    def act_restart_pd(self) -> None:
        """Restarts the PD."""
        pd = next((p for p in self._app.state.processes if p.role is Role.PD), None)
        if pd is None:
            self._app.say("there is no PD", "warn")
        else:
            self._ask("restart", pd)

    def act_scale(self) -> None:
        """Asks how many encoders there should be."""
        app = self._app
        now = sum(p.role is Role.ENCODER for p in app.state.processes)

        def wanted(text: str | None) -> None:
            if text is None or text.strip() in ("", str(now)):
                return
            if not text.strip().isdigit() or not 1 <= int(text) <= ENCODERS_MAX:
                app.say(f"scale: {text!r} is no number from 1 to {ENCODERS_MAX}", "warn")
                return
            count = int(text)
            title, lines = costs.scale(app.state, count)
            self._confirm(title, lines, "scale", lambda: self._send("scale", str(count)))

        app.push_screen(AskLine("How many encoders", str(now)), wanted)

    def act_doctor(self) -> None:
        """Runs the doctor and shows what it says."""
        self._run_command("Doctor", ["doctor"])

    def act_diagnostics(self) -> None:
        """Writes the bundle into the present directory."""
        name = f"eccon-{export.safe(self._app.state.cluster.name)}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"
        self._send("diagnostics", str(Path(name).absolute()))

    def _run_command(self, title: str, arguments: list[str]) -> None:
        """Runs an `eccon` command for this cluster beside the console."""
        from eccon.console.screens.output import Output  # noqa: PLC0415  loaded when wanted

        cluster = self._app.state.cluster
        path = cluster.config_path
        if not path or not Path(path).is_file():
            self._app.say(f"{title}: {path or 'the configuration'} is not on this machine", "warn")
            return
        # Where that cluster's daemon is: this console may have come by its socket, from another environment.
        state = {"ECCON_STATE_DIR": str(Path(cluster.state_dir).parent)} if cluster.state_dir else {}
        self._app.push_screen(Output(title, ["-f", path, *arguments], state))

    def act_reload(self) -> None:
        """Has the configuration read again."""
        self._ask("reload", None)

    # Screens

    def act_prompt(self) -> None:
        """Opens the test prompt."""
        from eccon.console.screens.prompt import Prompt  # noqa: PLC0415  loaded when wanted

        self._app.push_screen(Prompt())

    def act_traces(self) -> None:
        """Opens the list of requests."""
        from eccon.console.screens.traces import Traces  # noqa: PLC0415  loaded when wanted

        self._app.push_screen(Traces())

    def act_charts(self) -> None:
        """Opens the charts."""
        from eccon.console.screens.charts import Charts  # noqa: PLC0415  loaded when wanted

        self._app.push_screen(Charts())

    def act_events(self) -> None:
        """Opens alarms and history."""
        from eccon.console.screens.events import Events  # noqa: PLC0415  loaded when wanted

        self._app.push_screen(Events())

    def act_logs(self) -> None:
        """Opens the log of the chosen process."""
        process = self._chosen()
        self.open_logs(process.name if process else "daemon")

    def open_logs(self, name: str, search: str = "", at: float | None = None) -> None:
        """Opens a process's log, at the lines with `search`, or at a Unix time."""
        from eccon.console.screens.logs import Logs  # noqa: PLC0415  loaded when wanted

        self._app.push_screen(Logs(name, search, at))

    def open_all_trace_logs(self, trace: Trace) -> None:
        """Opens all logs merged, at the lines that name the request or one of its items."""
        from eccon.console.screens.logs import ALL  # noqa: PLC0415  loaded when wanted

        names = [trace.id, *dict.fromkeys(s.uuid for s in trace.spans if s.kind == "encode" and s.uuid)]
        self.open_logs(ALL, f"/{'|'.join(re.escape(name) for name in names)}/")

    def open_trace_logs(self, trace: Trace) -> None:
        """Opens the log of the encoder of the request's slowest item, at its lines, else the proxy's."""
        encodes = [s for s in trace.spans if s.kind == "encode" and s.uuid]
        if encodes:
            slowest = max(encodes, key=lambda s: (s.end or s.start) - s.start)
            self.open_logs(slowest.encoder, slowest.uuid)
            return
        proxy = next((p.name for p in self._app.state.processes if p.role is Role.PROXY), "daemon")
        self.open_logs(proxy, trace.id)

    def open_trace(self, trace_id: str) -> None:
        """Opens a request's waterfall."""
        from eccon.console.screens.trace import TraceScreen  # noqa: PLC0415  loaded when wanted

        self._app.push_screen(TraceScreen(trace_id))

    def open_detail(self, name: str) -> None:
        """Opens a process's detail."""
        from eccon.console.screens.detail import Detail  # noqa: PLC0415  loaded when wanted

        self._app.push_screen(Detail(name))

    def act_back(self) -> None:
        """To the screen before."""
        if len(self._app.screen_stack) > 1:
            self._app.pop_screen()

    def act_help(self) -> None:
        """Shows the keys of the screen at hand."""
        screen = self._app.screen
        if isinstance(screen, ConsoleScreen):
            self._app.push_screen(Help(screen.SCOPE, self._app.offered(actions.in_scope(screen.SCOPE))))

    def act_palette(self) -> None:
        """Opens the palette."""
        from textual.command import CommandPalette  # noqa: PLC0415  loaded when wanted

        class Palette(SteadySize, CommandPalette):
            """Textual's, with our sizes."""

        if not any(isinstance(screen, CommandPalette) for screen in self._app.screen_stack):
            self._app.push_screen(Palette(id="--command-palette"))

    def ask_line(
        self, label: str, value: str, done: Callable[[str | None], None], *, live: bool = True
    ) -> None:
        """Asks for one line; `done` gets it (live: as it is typed), and the old value when it is given up."""
        self._app.push_screen(
            AskLine(label, value, done if live else None), lambda text: done(value if text is None else text)
        )

    def act_acknowledge(self) -> None:
        """Quiets the alarms at hand."""
        self._app.acknowledged |= {a.key for a in self._app.state.alarms}
        self._app.redraw()

    def act_theme(self) -> None:
        """Opens the choice of colours."""
        from eccon.console.screens.themes import ThemeChoice  # noqa: PLC0415  loaded when wanted

        self._app.push_screen(ThemeChoice())

    # A recording

    def act_faster(self) -> None:
        """Twice as fast."""
        self._replay(lambda replay: replay.faster(2.0))

    def act_slower(self) -> None:
        """Half as fast."""
        self._replay(lambda replay: replay.faster(0.5))

    def act_hold(self) -> None:
        """Stops the clock, or lets it run."""
        self._replay(lambda replay: replay.hold())

    def _replay(self, do: "Callable[[Replay], None]") -> None:
        from eccon.console.replay import Replay  # noqa: PLC0415  loaded when wanted

        if isinstance(self._app.link, Replay):
            do(self._app.link)
            self._app.say(self._app.link.flag)
        else:
            self._app.say("this is no recording")

    # Terminal

    def act_redraw(self) -> None:
        """Sends everything again."""
        self._app.painter.forget()
        self._app.screen.refresh()

    def act_bell(self) -> None:
        """Bell on or off."""
        self._app.bell_on = not self._app.bell_on
        self._app.say(f"the bell on a new alarm is {'on' if self._app.bell_on else 'off'}")

    def act_notify(self) -> None:
        """Desktop notifications on or off."""
        app = self._app
        kind: Notify = "off" if app.notify_by != "off" else "osc9"
        if kind != "off" and app.settings.notify != "off":
            kind = app.settings.notify
        app.notify_by = kind
        app.say(f"desktop notification of a new alarm: {kind}")

    def act_mouse(self) -> None:
        """Gives the mouse to the terminal, or takes it."""
        driver = self._app._driver
        if not isinstance(driver, LinuxDriver):
            return
        released = driver._mouse
        if released:
            driver._disable_mouse_support()
        driver._mouse = not released
        if not released:
            driver._enable_mouse_support()
        self._app.say(
            "the mouse is the terminal's: select as usual" if released else "the mouse is the console's"
        )

    def copy(self, text: str, what: str) -> None:
        """Copies by OSC 52 when the terminals take so much, and always into a file, saying where."""
        short = len(text.encode("utf-8", "replace")) * 4 / 3 <= export.CLIPBOARD_MAX
        if short:
            self._app.copy_to_clipboard(text)
        try:
            path = export.save_copy(text)
        except OSError as e:
            way = "copied, but" if short else "too long for the clipboard, and"
            self._app.say(f"{what}: {way} in no file: {e.strerror}", "warn", 12.0)
            return
        self._app.say(f"{what}: {'copied, and' if short else 'too long for the clipboard,'} in {path}", "ok")

    def copy_trace(self, trace: Trace) -> None:
        """Copies a request as curl."""
        self.copy(export.curl(trace, self._app.state.cluster.public_url), "curl")

    def action_interrupt(self) -> None:
        """Ctrl-C: copies what is marked, else asks to leave; a second one leaves. Stops no server."""
        app = self._app
        focused = app.focused
        marked = focused.selected_text if isinstance(focused, Input) else ""
        marked = marked or app.screen.get_selected_text() or ""
        if marked:
            self.copy(marked, "selection")
            app.screen.clear_selection()
        elif isinstance(app.screen, Leave):
            app.exit(0)
        else:
            app.push_screen(Leave(clean(app.state.cluster.name)), self._left)

    def act_quit(self) -> None:
        """Leaves; asks about the servers first where that is wanted."""
        app = self._app
        if not app.on_quit_ask or app.read_only:
            app.exit(0)
        elif not isinstance(app.screen, Leave):
            app.push_screen(Leave(clean(app.state.cluster.name)), self._left)

    def _left(self, answer: str | None) -> None:
        if answer == "leave":
            self._app.exit(0)
        elif answer == "stop" and self._app.read_only:
            self._app.say("this console is read-only", "warn")
        elif answer == "stop":
            self._app.run_worker(self._stop_and_leave(), group="leave", exclusive=True)

    async def _stop_and_leave(self) -> None:
        if await self._sent("shutdown", ""):
            self._app.exit(0)
