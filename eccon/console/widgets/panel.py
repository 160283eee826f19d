"""A frame with a title that may change each second."""

from typing import Any

from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Region

__all__ = ["Panel"]


class Panel(Vertical):
    """Textual paints all of a container for a new title; here it is the line of the title."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._entitled = False

    def entitle(self, title: Content) -> None:
        """Another title."""
        self._entitled = True
        try:
            self.border_title = title
        finally:
            self._entitled = False

    def refresh(self, *regions: Region, **kwargs: Any) -> "Panel":
        if self._entitled and not regions:
            x, y = self.content_offset  # regions are counted from there
            regions = (Region(-x, -y, self.outer_size.width, 1),)
        super().refresh(*regions, **kwargs)
        return self
