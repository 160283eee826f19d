"""A shell script's words and operators, quotes kept: as much of the grammar as launch scripts use."""

import re
from typing import NamedTuple

__all__ = ["ScriptError", "Token", "closing", "tokens"]

OPERATORS = ("<<<", "&>>", "<<-", "&&", "||", ";;", ">>", "<<", "&>", ">&", "<&", ";", "&", "|", "<", ">")
PAIRS = {"{": "}", "(": ")"}


class ScriptError(Exception):
    """A script cannot be read; the message says where and why."""


class Token(NamedTuple):
    """`kind` is word, op, newline, or arith (what is between `((` and `))`)."""

    kind: str
    text: str
    line: int


def closing(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`, quotes and inner brackets skipped.

    Raises:
        ScriptError: there is none.
    """
    opening, depth, i = text[start], 0, start
    while i < len(text):
        c = text[i]
        if c == "\\":
            i += 1
        elif c in "'\"" and i > start:
            i = _quote_end(text, i) - 1
        elif c == opening:
            depth += 1
        elif c == PAIRS[opening]:
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    msg = f"line {text.count(chr(10), 0, start) + 1}: {opening} is never closed"
    raise ScriptError(msg)


def _quote_end(text: str, start: int) -> int:
    quote, i = text[start], start + 1
    while i < len(text):
        if text[i] == quote:
            return i + 1
        if text[i] == "\\" and quote == '"':
            i += 1
        elif quote == '"' and text.startswith(("$(", "${"), i):
            i = closing(text, i + 1) - 1
        i += 1
    msg = f"line {text.count(chr(10), 0, start) + 1}: the quote {quote} is never closed"
    raise ScriptError(msg)


def tokens(text: str) -> list[Token]:
    """In order. Comments, continuations and here-documents are gone.

    Raises:
        ScriptError: a quote or bracket is never closed.
    """
    text = re.sub(r"\\\r?\n", lambda m: " " + "\x00" * m[0].count("\n"), text.replace("\r\n", "\n"))
    found: list[Token] = []
    documents: list[str] = []
    i, line = 0, 1
    while i < len(text):
        c = text[i]
        if c in " \t\x00":
            line += c == "\x00"
            i += 1
        elif c == "\n":
            found.append(Token("newline", "\n", line))
            i, line = i + 1, line + 1
            for mark in documents:
                document = re.compile(rf"(?:.*\n)*?\t*{re.escape(mark)}[ \t]*(?=\n|$)").match(text, i)
                skipped = document[0] if document else text[i:]
                i, line = i + len(skipped), line + skipped.count("\n")
            documents = []
        elif c == "#":
            i = (text + "\n").index("\n", i)
        elif text.startswith("((", i):
            end = closing(text, i)
            found.append(Token("arith", text[i + 2 : end - 2], line))
            line += text.count("\n", i, end)
            i = end
        elif op := next((o for o in OPERATORS if text.startswith(o, i)), ""):
            found.append(Token("op", op, line))
            i += len(op)
        elif c in "()":
            found.append(Token("op", c, line))
            i += 1
        else:
            end = _word_end(text, i)
            word = text[i:end]
            found.append(Token("word", word.replace("\x00", ""), line))
            line += word.count("\n") + word.count("\x00")
            if len(found) > 1 and found[-2].text in {"<<", "<<-"}:
                documents.append(word.strip("'\"\\"))
            i = end
    return found


def _word_end(text: str, i: int) -> int:
    while i < len(text) and text[i] not in " \t\n\x00;&|<>":
        if text[i] == "\\":
            i += 2
        elif text[i] in "'\"":
            i = _quote_end(text, i)
        elif text.startswith(("$(", "${"), i):
            i = closing(text, i + 1)
        elif text[i] == "(" and text[i - 1] == "=":  # an array
            i = closing(text, i)
        elif text[i] in "()":
            break
        elif text[i] == "`":
            i = (text + "`").index("`", i + 1) + 1
        else:
            i += 1
    return min(i, len(text))
