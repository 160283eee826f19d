"""Small dialogs: a question, one line of text, leaving, help."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key, Paste
from textual.screen import ModalScreen
from textual.widgets import Input

from eccon.console import actions
from eccon.console.draw.text import Line, clean, fit, wrap
from eccon.console.screens.steady import SteadySize
from eccon.console.widgets.lines import Lines
from eccon.console.widgets.rows import Rows

if TYPE_CHECKING:
    from eccon.console.app import ConsoleApp

__all__ = ["HELP_MARGIN", "AskLine", "Choice", "Help", "Jump", "Leave", "LineInput"]

R = TypeVar("R")

HELP_MARGIN = 32
"""Cells for key and title; what an action does is folded to the right of them."""


class Choice(SteadySize, ModalScreen[R]):
    """A question with answers in a row; the first one is chosen at the start."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,shift+tab,up", "step(-1)", show=False),
        Binding("right,tab,down", "step(1)", show=False),
        Binding("enter", "take", show=False, priority=True),
        Binding("escape,q", "leave", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[str], answers: Sequence[tuple[str, str, R]]) -> None:
        """`answers`: key, word, result. The first is the default and what escape means."""
        super().__init__(classes="dialog")
        self.question = title
        self.lines = list(lines)
        self.answers = list(answers)
        self.at = 0

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Lines(id="ask")

    def on_mount(self) -> None:
        self.draw()

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        """Lays the question out for the present width."""
        answers_width = sum(len(word) + 6 for _, word, _ in self.answers)
        wanted = max(len(self.question), answers_width, *(len(text) for text in self.lines), 30)
        width = max(min(wanted, self.app.size.width - 6), 8)
        lines: list[Line] = [[(piece, "title")] for piece in wrap(self.question, width)]
        for text in self.lines:
            lines += [[(piece, "text")] for piece in wrap(text, width)]
        lines.append([])
        row: Line = []
        used = 0
        for i, (key, word, _) in enumerate(self.answers):
            if used and used + len(word) + 6 > width:
                lines.append(row)
                row, used = [], 0
            used += len(word) + 6
            text = f" {word} "
            row += [(key, "key"), (text, "brand" if i == self.at else "text"), ("   ", "text")]
        lines.append(row)
        if not self.query("#ask"):
            return  # the app is closing
        box = self.query_one("#ask", Lines)
        box.styles.width = width
        box.styles.height = len(lines)
        box.show(lines)

    def on_key(self, event: Key) -> None:
        for key, _, result in self.answers:
            if event.character == key:
                event.stop()  # else it goes on to the screen below, and means something there
                self.dismiss(result)
                return

    def action_step(self, by: int) -> None:
        """The next answer."""
        self.at = (self.at + by) % len(self.answers)
        self.draw()

    def action_take(self) -> None:
        """The answer at hand."""
        self.dismiss(self.answers[self.at][2])

    def action_leave(self) -> None:
        """The default: nothing is done."""
        self.dismiss(self.answers[0][2])


class Leave(Choice[Literal["", "leave", "stop"]]):
    """On leaving: the servers go on, or are stopped, or we stay."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,ctrl+c", "again", show=False, priority=True)]

    def __init__(self, cluster: str) -> None:
        super().__init__(
            f"Leave the console of {clean(cluster)}?",
            ["The servers go on without it; `eccon` opens it again."],
            [("l", "leave", "leave"), ("s", "stop the servers and leave", "stop"), ("c", "cancel", "")],
        )

    def action_leave(self) -> None:
        """Escape stays; a second `q` leaves: it was meant the first time."""
        self.dismiss("")

    def action_again(self) -> None:
        """Asked for twice."""
        self.dismiss("leave")


class LineInput(Input):
    """One line of text; what is pasted is one line too, without the line end."""

    def on_mount(self) -> None:
        self.cursor_blink = False  # an idle console writes nothing

    async def take(self, event: Key) -> None:
        """Puts a printable key in at the cursor, at once."""
        await self._on_key(event)

    def _on_paste(self, event: Paste) -> None:
        self.take_paste(event)

    def take_paste(self, event: Paste) -> None:
        """Puts in what was pasted, at once."""
        text = " ".join(part for part in event.text.splitlines() if part.strip())
        self.insert_text_at_cursor(clean(text))
        event.stop()
        event.prevent_default()


class AskLine(SteadySize, ModalScreen[str | None]):
    """One line of text at the bottom of the screen; escape gives None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", show=False)]

    def __init__(self, label: str, value: str, live: Callable[[str], None] | None = None) -> None:
        super().__init__(classes="bar")
        self.label = label
        self.value = value
        self.live = live

    def compose(self) -> ComposeResult:
        with Vertical(classes="ask"):
            yield Lines(id="label")
            yield LineInput(self.value, id="line", compact=True)

    def on_mount(self) -> None:
        self.query_one("#label", Lines).show([[(f" {self.label}", "title"), ("   enter  esc", "hint")]])
        self.query_one("#line", Input).focus()

    def on_key(self, event: Key) -> None:
        """What is typed before the field has the focus goes into it all the same."""
        line = self.query_one("#line", Input)
        if event.is_printable and event.character and not line.has_focus:
            line.insert_text_at_cursor(event.character)
            event.stop()
        elif event.key == "enter" and not line.has_focus:
            event.stop()
            self.dismiss(line.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)

    def on_input_changed(self, event: Input.Changed) -> None:
        if self.live is not None:
            self.live(event.value)

    def action_cancel(self) -> None:
        """Nothing is changed."""
        self.dismiss(None)


class Jump(SteadySize, ModalScreen[str]):
    """Waits for one of the letters that the panes below wear; "" for any other key."""

    def __init__(self, letters: str) -> None:
        super().__init__(classes="bar")
        self.letters = letters

    def on_key(self, event: Key) -> None:
        event.stop()
        character = event.character or ""
        self.dismiss(character if character and character in self.letters else "")


class Help(SteadySize, ModalScreen[None]):
    """The keys of the screen at hand, from the table of actions."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1,enter", "dismiss_help", show=False)
    ]
    AUTO_FOCUS = "#keys"

    def __init__(self, scope: str, shown: Sequence[actions.Action]) -> None:
        """`shown`: those of the scope's actions that this console has."""
        super().__init__(classes="dialog")
        self.scope = scope
        self.shown = shown

    def compose(self) -> ComposeResult:
        with Vertical(classes="box wide"):
            yield Rows(document=True, id="keys")

    def on_mount(self) -> None:
        self.query_one(".box").border_title = f"Keys of this screen: {self.scope}"
        self.call_after_refresh(self.draw)

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    def draw(self) -> None:
        """One line an action: key, what it does, its command."""
        app = cast("ConsoleApp", self.app)
        rows = self.query_one("#keys", Rows)
        width = rows.size.width
        keymap = app.settings.keys
        out: list[Line] = []
        for action in self.shown:
            out += _entry(actions.key_label(action, keymap), action.title, action.tooltip, width)
            if action.command and width >= 60:
                out.append([(" " * HELP_MARGIN, "text"), (action.command, "accent")])
        out.append([])
        out += _entry("move", "↑ ↓ j k pgup pgdn", "g first, G last, tab the next pane", width)
        out += _entry("^c", "copy or leave", "copies what the mouse marked; twice: leave", width)
        out.append([])
        ending = "Servers go on when this console ends. After kill -9 of it, `reset` mends the terminal."
        out += [[(f" {piece}", "dim")] for piece in wrap(ending, width - 2)]
        rows.put([], [(str(i), line) for i, line in enumerate(out)])

    def action_dismiss_help(self) -> None:
        """Back to the screen."""
        self.dismiss(None)


def _entry(key: str, title: str, text: str, width: int) -> list[Line]:
    """Key, title, and what it does in as many lines as that takes."""
    head: Line = [(f" {key:>6}  ", "key"), (fit(title, HELP_MARGIN - 9), "text")]
    pieces = wrap(text, max(width - HELP_MARGIN - 1, 10))
    more: list[Line] = [[(" " * HELP_MARGIN, "text"), (piece.lstrip(), "dim")] for piece in pieces[1:]]
    return [[*head, (pieces[0], "dim")], *more]
