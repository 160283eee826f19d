"""The test prompt: fields above, the answer below as it streams, and what became of each image."""

import asyncio
import time
from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Paste, Resize
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.timer import Timer
from textual.widgets import Input

from eccon.console import paths, prompting
from eccon.console.draw import figures
from eccon.console.draw.text import Line, clean, clean_lines, fit, fit_line, wrap
from eccon.console.prompting import Draft, Run
from eccon.console.screens.dialogs import LineInput
from eccon.console.screens.steady import SteadySize
from eccon.console.widgets.lines import Lines
from eccon.console.widgets.previews import Previews
from eccon.console.widgets.rows import Rows
from eccon.model import Trace
from eccon.prompt import PromptError, image_reports

if TYPE_CHECKING:
    from eccon.console.app import ConsoleApp

__all__ = ["Prompt"]

TEXT = "Briefly describe each of these images."
FIELDS = (
    ("model", "model"),
    ("text", "text"),
    ("images", "images"),
    ("max_tokens", "max tokens"),
    ("load", "load"),
    ("extra", "extra JSON"),
)
SAMPLE_STEPS = ("samples:1", "samples:2", "samples:4", "samples", "")
FRAME_S = 0.25
PREVIEW_ROWS = (0, 3, 5)
"""Lines of the previews: as many as a small, a middling and a large terminal have room for."""


class _Paths(Suggester):
    """Completes the last word as a path."""

    def __init__(self) -> None:
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        return await asyncio.to_thread(paths.complete, value)


class _Images(LineInput):
    """Takes dropped files, which terminals paste, as words beside those that are there."""

    def take_paste(self, event: Paste) -> None:
        text = paths.pasted(event.text)
        if paths.is_drop(text):
            before = self.value[: self.cursor_position]
            text = f"{' ' if before and not before[-1].isspace() else ''}{text} "
        super().take_paste(Paste(text))
        event.stop()
        event.prevent_default()


class Prompt(SteadySize, ModalScreen[None]):
    """Fields, thumbnails, answer, images."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False, priority=True),
        Binding("ctrl+s", "samples", show=False, priority=True),
        Binding("ctrl+t", "stream", show=False, priority=True),
        Binding("ctrl+y", "copy(0)", show=False, priority=True),
        Binding("ctrl+o", "copy(1)", show=False, priority=True),
        Binding("ctrl+w", "waterfall", show=False, priority=True),
        Binding("up", "history(-1)", show=False),
        Binding("down", "history(1)", show=False),
    ]
    AUTO_FOCUS = "#text"

    def __init__(self) -> None:
        super().__init__(classes="dialog")
        self.stream = True
        self.run: Run | None = None
        self.problem = ""
        self.copied: Line = []
        self._timer: Timer | None = None
        self._past: int | None = None

    @property
    def console_app(self) -> "ConsoleApp":
        """The app, by its own type."""
        return cast("ConsoleApp", self.app)

    def compose(self) -> ComposeResult:
        app = self.console_app
        last: Draft | None = app.prompts[-1] if app.prompts else None
        values = {
            "model": last.model if last else app.state.cluster.model,
            "text": last.text if last else TEXT,
            "images": last.images if last else "samples",
            "max_tokens": str(last.max_tokens if last else 256),
            "load": "1",
            "extra": last.extra if last else "",
        }
        hints = {
            "images": "paths, *.png, directories, URLs, samples:4, new:2x640x480",
            "load": "20x4: twenty requests, four at once; 30sx4: for 30 s",
            "extra": 'more of the body, such as {"temperature": 0}',
        }
        self.stream = last.stream if last else True
        with Vertical(id="prompt-box", classes="box"):
            for name, _ in FIELDS:
                with Horizontal(classes="field"):
                    yield Lines(id=f"l-{name}")
                    hint = hints.get(name, "")
                    if name == "images":
                        yield _Images(
                            values[name],
                            placeholder=hint,
                            id=name,
                            suggester=_Paths(),
                            select_on_focus=False,
                        )
                    else:
                        yield LineInput(values[name], placeholder=hint, id=name, select_on_focus=False)
            yield Previews(id="thumbs")
            yield Rows(document=True, id="answer")
            yield Lines(id="prompt-keys")

    def on_mount(self) -> None:
        self.query_one("#prompt-box").border_title = "Test prompt"
        for name, label in FIELDS:
            self.query_one(f"#l-{name}", Lines).show([[(label, "dim")]])
        self.set_interval(1.0, self._follow)
        self.call_after_refresh(self.draw)

    def on_resize(self, event: Resize) -> None:
        small = event.size.height < 20
        for name in ("load", "extra", "max_tokens"):
            self.query_one(f"#l-{name}").parent.display = not small  # type: ignore[union-attr]
        self.call_after_refresh(self.draw)

    def draft(self) -> Draft:
        """What the fields say. Raises PromptError."""
        value = {name: self.query_one(f"#{name}", Input).value.strip() for name, _ in FIELDS}
        try:
            max_tokens = int(value["max_tokens"])
        except ValueError as e:
            msg = f"max tokens: {value['max_tokens']!r} is no whole number"
            raise PromptError(msg) from e
        times, seconds, width = prompting.load_of(value["load"])
        return Draft(
            model=value["model"],
            text=value["text"],
            images=value["images"],
            stream=self.stream,
            max_tokens=max_tokens,
            extra=value["extra"],
            repeat=times,
            at_once=width,
            seconds=seconds,
        )

    # Sending

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if self.run is not None and not self.run.over:
            self.problem = "the request before is still under way; esc ends it"
            self.draw()
            return
        try:
            draft = self.draft()
            run = prompting.new_run(draft)
        except PromptError as e:
            self.problem, self.copied = str(e), []
            self.draw()
            return
        self.problem, self.copied = "", []
        self.run = run
        past = self.console_app.prompts
        if not past or past[-1] != draft:
            past.append(draft)
            del past[:-50]
        self._past = None
        self.run_worker(self._send(draft, run), group="prompt", exclusive=True)
        self.draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        """The thumbnails follow what is typed, not with every key."""
        if event.input.id == "images":
            self._changed()

    async def _send(self, draft: Draft, run: Run) -> None:
        try:
            await prompting.send(self.console_app.link, draft, run, self._changed)
        except PromptError as e:
            self.problem, self.copied = str(e), []
            if self.run is run:
                self.run = None  # nothing was sent
            self.draw()

    def _changed(self) -> None:
        if self._timer is None:
            self._timer = self.set_timer(FRAME_S, self._frame)

    def _frame(self) -> None:
        self._timer = None
        self.draw()

    def _follow(self) -> None:
        if self.run is not None and (not self.run.over or time.monotonic() - self.run.started < 60):
            self.draw()

    # Drawing

    def trace(self) -> Trace | None:
        """The trace of the (first) request, once it is known."""
        return self.console_app.trace(self.run.request_id) if self.run is not None else None

    def draw(self) -> None:
        """Thumbnails, answer, keys."""
        if not self.is_mounted:
            return
        self._draw_previews()
        box = self.query_one("#answer", Rows)
        lines = self._answer(max(box.size.width, 10))
        at_end = box.first >= max(0, len(box.keys) - box.size.height)
        box.put([], [(str(i), line) for i, line in enumerate(lines)])
        if at_end and self.run is not None and not self.run.over:
            box.first = len(lines)
            box.draw()
        bar = self.query_one("#prompt-keys", Lines)
        bar.show([self._keys(bar.size.width)])

    def _keys(self, width: int) -> Line:
        """The dialog's keys, as many as fit; how to leave is always among them."""
        last = ("esc", "close")
        room = width - len(" ".join(last))
        line: Line = []
        keys = [
            ("enter", "send"),
            ("^s", "samples"),
            ("^t", f"stream {'on' if self.stream else 'off'}"),
            ("^y", "curl"),
            ("^o", "Python"),
            ("↑↓", "history"),
        ]
        keys.insert(5 if self.trace() is None else 1, ("^w", "waterfall"))
        for key, word in keys:
            room -= len(key) + len(word) + 3
            if room < 0:
                break
            line += [(key, "key"), (f" {word}  ", "hint")]
        return fit_line([*line, (last[0], "key"), (f" {last[1]}", "hint")], width)

    def _draw_previews(self) -> None:
        height = self.size.height if self.console_app.previews else 0
        rows = PREVIEW_ROWS[(height >= 28) + (height >= 40)]
        self.query_one("#thumbs", Previews).put(self.query_one("#images", Input).value, rows)

    def _answer(self, width: int) -> list[Line]:
        run = self.run
        lines: list[Line] = []
        if self.problem:
            lines += [[(piece, "error")] for piece in wrap(clean(self.problem), width)]
        if self.copied:
            lines += [[(piece, tone)] for text, tone in self.copied for piece in wrap(text, width)]
        if run is None:
            return lines
        lines.append(self._summary(run, width))
        if run.error:
            lines += [[(piece, "error")] for piece in wrap(clean(run.error), width)]
        for text in clean_lines(run.reader.text):
            lines += [[(piece, "text")] for piece in wrap(text, width)]
        trace = self.trace()
        if trace is not None and (reports := image_reports(trace)):
            lines += [
                [],
                [(fit("image", 6), "head"), (fit("encoder", 14), "head"), ("   encode    transfer", "head")],
            ]
            for r in reports:
                again = f"   {r.attempts} attempts" if r.attempts > 1 else ""
                took = figures.NONE if r.encode_ms is None else f"{figures.ms(r.encode_ms)} ms"
                moved = figures.NONE if r.transfer_ms is None else f"{figures.ms(r.transfer_ms)} ms"
                lines.append(
                    [
                        (f"{r.item + 1:>5} ", "text"),
                        (fit(clean(r.encoder), 14), "accent"),
                        (f"{took:>9}   {moved:>9}", "text"),
                        (again, "warn"),
                    ]
                )
            if trace.status == 200:
                seen = {r.item for r in reports}
                lines += [
                    [(f"{item + 1:>5} ", "text"), ("the same as an earlier one", "dim")]
                    for item in range(trace.items)
                    if item not in seen
                ]
        return lines

    def _summary(self, run: Run, width: int) -> Line:
        mark, tone = ("✗ ", "bad") if run.failed else ("○ ", "warn") if run.stopped else ("● ", "ok")
        line: Line = [(mark, tone) if run.over or run.failed else ("◐ ", "busy"), (run.request_id, "title")]
        if run.total != 1:
            line.append((f"  {run.done}{f'/{run.total}' if run.total else ''} answered", "text"))
            if run.failed:
                line.append((f"  {run.failed} failed", "error"))
        if run.first_bytes:
            ordered = sorted(run.first_bytes)
            middle, late = (figures.seconds(ordered[len(ordered) * n // 100]) for n in (50, 99))
            said = f"TTFT {middle} s" if run.total == 1 else f"TTFT p50/p99 {middle}/{late} s"
            line.append((f"  {said}", "dim"))
        seconds = run.lasted()
        if run.over:
            line.append((f"  total {figures.seconds(seconds)} s", "dim"))
        if run.tokens and seconds:
            line.append((f"  {run.tokens} tokens  {run.tokens / seconds:.0f}/s", "dim"))
        return fit_line(line, width)

    # Keys

    def action_leave(self) -> None:
        """Ends a request under way (the connection is closed, so servers abort), else closes."""
        if self.run is not None and not self.run.over:
            self.workers.cancel_group(self, "prompt")
            self.run.stopped = True
            self.run.end()
            self.run.error = "ended by you"
            self.draw()
        else:
            self.dismiss(None)

    def action_samples(self) -> None:
        """The next number of sample images."""
        field = self.query_one("#images", Input)
        at = SAMPLE_STEPS.index(field.value) if field.value in SAMPLE_STEPS else -1
        field.value = SAMPLE_STEPS[(at + 1) % len(SAMPLE_STEPS)]
        self.draw()

    def action_stream(self) -> None:
        """Streamed or not."""
        self.stream = not self.stream
        self.draw()

    def action_copy(self, python: int) -> None:
        """The request as curl or as Python."""
        url = self.console_app.state.cluster.public_url
        try:
            text = prompting.as_python(self.draft(), url) if python else prompting.as_curl(self.draft(), url)
        except PromptError as e:
            self.problem, self.copied = str(e), []
        else:
            self.console_app.copy(text, "Python" if python else "curl")
            self.problem, self.copied = "", self.console_app.message
        self.draw()

    def action_waterfall(self) -> None:
        """The waterfall of the request."""
        if (trace := self.trace()) is not None:
            self.dismiss(None)
            self.console_app.open_trace(trace.id)

    def action_history(self, by: int) -> None:
        """An earlier prompt's fields."""
        past: list[Draft] = self.console_app.prompts
        if not past:
            return
        at = len(past) if self._past is None else self._past
        self._past = min(max(at + by, 0), len(past) - 1)
        draft = past[self._past]
        for name in ("model", "text", "images", "extra", "max_tokens"):
            self.query_one(f"#{name}", Input).value = str(getattr(draft, name))
        self.query_one("#load", Input).value = prompting.load_text(draft)
        self.stream = draft.stream
        self.draw()
