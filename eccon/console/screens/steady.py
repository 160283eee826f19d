"""What keeps a screen from running after sizes that the terminal does not have any more."""

from textual.geometry import Size

__all__ = ["SteadySize"]


class SteadySize:
    """A mixin before Textual's screen.

    A layout for a size makes Textual post that size to the screen again. With two different ones under way,
    as when a window is dragged, each so calls up the other for ever, at a whole core and with no frame drawn
    (seen with Textual 8.2.8). So only the size that the terminal has is laid out.
    """

    def _screen_resized(self, size: Size) -> None:
        if size == self.app.size:  # type: ignore[attr-defined]
            super()._screen_resized(size)  # type: ignore[misc]
