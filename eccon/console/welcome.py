"""The first screen where there is no configuration: what was found, and what can be made of it."""

import asyncio
import os
import signal
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Resize
from textual.filter import LineFilter
from textual.screen import Screen

from eccon.console import filters, keymap, terminal, themes
from eccon.console.crash import Discreet
from eccon.console.draw.text import Line, clean, fit_line
from eccon.console.driver import ConsoleDriver
from eccon.console.screens.dialogs import AskLine
from eccon.console.screens.steady import SteadySize
from eccon.console.widgets.lines import Lines
from eccon.console.widgets.rows import Rows
from eccon.discovery import Findings
from eccon.running import groups

__all__ = ["Welcome", "choices", "found", "welcome"]

SERVERS_SHOWN = 8


def found(findings: Findings) -> list[Line]:
    """What was found, a line a thing."""
    lines: list[Line] = []
    if findings.devices:
        shown = ", ".join(map(str, findings.devices))
        lines.append([(" devices   ", "dim"), (f"{len(findings.devices)} {findings.kind}: {shown}", "text")])
    else:
        lines.append([(" devices   ", "dim"), ("no NPU and no GPU here: the demo needs none", "text")])
    lines += [[(" model     ", "dim"), (clean(str(path)), "text")] for path in findings.models]
    if not findings.models:
        lines.append([(" model     ", "dim"), ("no compiled model here or in the home directory", "text")])
    for server in findings.servers[:SERVERS_SHOWN]:
        text = f"pid {server.pid}  port {server.port or '?'}  {clean(server.model)}"
        lines.append([(" server    ", "dim"), (text, "text")])
    if (more := len(findings.servers) - SERVERS_SHOWN) > 0:
        lines.append([("           ", "dim"), (f"and {more} more", "dim")])
    lines += [[(" cluster   ", "dim"), (f"{clean(name)} runs", "ok")] for name, _ in findings.clusters]
    return lines


def choices(findings: Findings) -> list[tuple[str, str]]:
    """(what is answered, what it says), the likeliest first."""
    out = [(f"attach:{path}", f"Open the cluster {name}") for name, path in findings.clusters]
    out += [(f"file:{path}", f"Use {path}") for path in findings.files]
    for i, group in enumerate(groups(findings.servers)):
        encoders = f"{n} encoders" if (n := len(group.encoders)) > 1 else "encoder"
        what = f"the PD on port {group.pd.port} and its {encoders}, which run"
        out.append((f"running:{i}", f"Write ./eccon.toml for {what}"))
    out += [(f"init:{path}", f"Write ./eccon.toml for {path} and these devices") for path in findings.models]
    out.append(("demo", "Run the demo: one PD, four encoders and the proxy on a stand-in for vLLM"))
    if not findings.models:
        out.append(("init:", "Write ./eccon.toml, the vendor guide's, to be filled in"))
    return [*out, ("file", "Use another file …"), ("", "Leave")]


class _Page(SteadySize, Screen[None]):
    """All of it."""


class Welcome(Discreet[str]):
    """Returns one of `choices`; a file that was asked for as "file:PATH"; "" when left."""

    CSS_PATH = "styles.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "take", show=False),
        Binding("escape,q,ctrl+c,ctrl+q", "leave", show=False),
    ]

    def __init__(self, findings: Findings, theme: str | None = None) -> None:
        environ = dict(os.environ)
        self._plain = terminal.no_colour(environ)
        self._own: list[LineFilter] = [filters.NoColour()] if self._plain else []
        if terminal.ascii_only(environ):
            self._own.append(filters.Ascii())
        files, _ = themes.load_all()
        settings, _ = keymap.load(themes.user_directory() / "console.toml")
        wanted = themes.NO_COLOUR if self._plain else theme or settings.theme or themes.DEFAULT
        chosen = wanted if wanted in files else themes.DEFAULT
        self.palette = themes.Palette(files[chosen])
        self.faded = False
        super().__init__(driver_class=ConsoleDriver)
        self.register_theme(files[chosen].textual())
        self.theme = chosen
        self.animation_level = "none"
        self.findings = findings

    def get_default_screen(self) -> Screen[Any]:
        """The one screen there is."""
        return _Page()

    def get_line_filters(self) -> list[LineFilter]:
        """As the console's."""
        return self._own if self._plain else [*super().get_line_filters(), *self._own]

    def compose(self) -> ComposeResult:
        with Vertical(id="welcome"):
            yield Lines(id="header")
            yield Lines(id="found")
            yield Rows(id="list")
            yield Lines(id="footer")

    def on_mount(self) -> None:
        if not self.is_headless:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self.exit, None, 128 + number)
        self.query_one("#list", Rows).focus()

    def on_resize(self, event: Resize) -> None:
        lines = found(self.findings)
        self.query_one("#found").styles.height = max(1, min(len(lines) + 2, event.size.height - 8))
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        width = self.size.width
        what: Line = [(" eccon ", "brand"), ("  there is no eccon.toml here. This is what there is:", "top")]
        self.query_one("#header", Lines).show([fit_line(what, width)])
        lines: list[Line] = [[], *found(self.findings), []]
        self.query_one("#found", Lines).show([fit_line(line, width) for line in lines])
        rows: list[tuple[str, Line]] = [
            (key, [(f" {clean(text)}", "text")]) for key, text in choices(self.findings)
        ]
        self.query_one("#list", Rows).put([], rows)
        keys: Line = [(" ↑↓", "key"), (" choose  ", "hint"), ("enter", "key"), (" do it  ", "hint")]
        keys += [("q", "key"), (" leave", "hint")]
        self.query_one("#footer", Lines).show([fit_line(keys, width)])

    def on_rows_opened(self) -> None:
        self.action_take()

    def action_take(self) -> None:
        """The chosen one; for another file its path is asked for."""
        chosen = self.query_one("#list", Rows).chosen or ""
        if chosen == "file":
            self.push_screen(AskLine("Path of the eccon.toml", ""), self._named)
        else:
            self.exit(chosen)

    def _named(self, path: str | None) -> None:
        if path and path.strip():
            self.exit(f"file:{path.strip()}")

    def action_leave(self) -> None:
        """Nothing."""
        self.exit("")


def welcome(findings: Findings, theme: str | None) -> tuple[str, int]:
    """What was chosen, and the exit code of the screen."""
    app = Welcome(findings, theme)
    chosen = app.run()
    return chosen or "", app.return_code or 0
