"""A request inside the engine: what it will say, and how far it has come."""

import re

from eccon.sim.ipc import Add, Output
from eccon.sim.vision import Tensor, TensorError, describe

__all__ = ["Running", "answer"]

_TOKEN = re.compile(r"\s*\w{1,6}|\s*[^\w\s]{1,3}|\s+")


def answer(add: Add, tensors: list[Tensor]) -> list[str]:
    """The whole answer, in tokens: one line an image, in order, or what the user said.

    Every image's line says only what its tensor says.
    """
    lines = []
    for i, tensor in enumerate(tensors, 1):
        try:
            seen = describe(tensor)
        except TensorError as e:
            lines.append(f"image {i}: unreadable ({e})")
            continue
        red, green, blue = seen.colour
        lines.append(f"image {i}: {seen.format} {seen.width}x{seen.height} #{red:02x}{green:02x}{blue:02x}")
    if not lines:
        lines = [f"You said: {add.text}" if add.text else "You said nothing."]
    words = _TOKEN.findall("\n".join(lines))
    return words + [" ..."] * max(0, add.min_tokens - len(words))


class Running:
    """One choice of one request that has a slot."""

    def __init__(self, add: Add, index: int, words: list[str], prompt_tokens: int) -> None:
        self.add = add
        self.index = index
        self.prompt_tokens = prompt_tokens
        self._words = words
        self._said = 0

    @property
    def tokens(self) -> int:
        """Held in the KV cache."""
        return self.prompt_tokens + self._said

    def next(self) -> Output:
        """One token more; the last one carries why it is the last. Like an end token, it may be empty."""
        word = self._words[self._said] if self._said < len(self._words) else ""
        self._said += 1
        reason = None
        if self._said >= self.add.max_tokens:
            reason = "length"
        if self._said > len(self._words):
            reason = "stop"
        return Output(self.add.id, self.index, word, self._said, reason, self.prompt_tokens)
