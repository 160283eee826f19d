"""An app's end by a fault of its own."""

from typing import TypeVar

from textual.app import App

__all__ = ["Discreet"]

T = TypeVar("T")


class Discreet(App[T]):
    """An app whose last words are a traceback without the values of variables: they may be secrets."""

    def _fatal_error(self) -> None:
        from rich.segment import Segments  # noqa: PLC0415  only after a crash
        from rich.traceback import Traceback  # noqa: PLC0415  only after a crash

        trace = Traceback(show_locals=False, width=None)
        self._exit_renderables.append(Segments(self.console.render(trace, self.console.options)))
        self._close_messages_no_wait()
