"""Walks a launch script as a shell would, and writes down the commands that it would start. Runs none."""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from eccon.scripts.expand import Values, arithmetic, fields, text
from eccon.scripts.lexer import ScriptError, Token, tokens

__all__ = ["Command", "read"]

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=(.*)$", re.DOTALL)
TURNS_MAX = 4096
DEPTH_MAX = 50
CLOSERS = frozenset({"done", "fi", "esac", "}", ")", "then", "else", "elif", "do", ";;"})


class Command(msgspec.Struct, frozen=True):
    """One command that the script would start."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """What it would have beyond what the script inherited."""
    path: Path
    line: int


def read(path: Path, environment: Mapping[str, str]) -> tuple[list[Command], set[str]]:
    """Commands of the script at `path`, and what could not be known without running something.

    Raises:
        ScriptError: it is no script that can be read.
    """
    values = Values(environment)
    walker = _Walker(path, values)
    walker.script(path)
    return walker.commands, values.guessed


class _Walker:
    def __init__(self, path: Path, values: Values) -> None:
        self.values = values
        self.path = path
        self.commands: list[Command] = []
        self.functions: dict[str, tuple[list[Token], int]] = {}
        self.depth = 0
        self.turns = 0

    def script(self, path: Path) -> None:
        try:
            source = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as e:
            msg = f"{path}: cannot be read: {e.strerror if isinstance(e, OSError) else 'is not UTF-8'}"
            raise ScriptError(msg) from e
        try:
            self.sequence(tokens(source), 0)
        except ScriptError as e:
            msg = f"{path}: {e}"
            raise ScriptError(msg) from e

    def sequence(self, ts: list[Token], i: int, *, act: bool = True) -> tuple[int, bool]:
        """Commands up to what closes them; where it ends, and whether the last one would succeed."""
        success = True
        doing = act
        while i < len(ts):
            t = ts[i]
            if t.kind == "newline" or t.text in {";", "&"}:
                doing = act
                i += 1
            elif t.text in {"&&", "||"}:
                doing = act and success == (t.text == "&&")
                i += 1
            elif t.text in CLOSERS and t.kind != "arith":
                break
            elif t.text == "|":
                i += 1
            else:
                i, result = self.command(ts, i, act=doing)
                success = result if doing else success
        return i, success

    def command(self, ts: list[Token], i: int, *, act: bool) -> tuple[int, bool]:
        t = ts[i]
        if t.kind == "arith":
            return i + 1, bool(arithmetic(t.text, self.values)) if act else True
        if t.kind == "op" and t.text == "(":
            with self.values.aside():
                end, ok = self.sequence(ts, i + 1, act=act)
            return end + 1, ok
        if t.text == "!":
            i, ok = self.command(ts, i + 1, act=act)
            return i, not ok
        compound = {
            "for": self._for,
            "while": self._while,
            "until": self._while,
            "if": self._if,
            "case": self._case,
            "{": self._group,
            "function": self._function,
        }.get(t.text)
        if compound is not None and t.kind == "word":
            return compound(ts, i, act)
        if i + 2 < len(ts) and (ts[i + 1].text, ts[i + 2].text) == ("(", ")"):
            return self._define(t.text, ts, i + 3)
        return self._simple(ts, i, act)

    def _skip(self, ts: list[Token], i: int, word: str) -> int:
        """Index after `word`, which must come next, blank lines apart."""
        while i < len(ts) and (ts[i].kind == "newline" or ts[i].text == ";"):
            i += 1
        if i >= len(ts) or ts[i].text != word:
            line = ts[min(i, len(ts) - 1)].line
            msg = f"line {line}: expected {word!r}"
            raise ScriptError(msg)
        return i + 1

    def _for(self, ts: list[Token], i: int, act: bool) -> tuple[int, bool]:
        if ts[i + 1].kind == "arith":
            first, condition, step = [*ts[i + 1].text.split(";"), "", ""][:3]
            body = self._skip(ts, i + 2, "do")
            if act:
                arithmetic(first, self.values)
            while act and arithmetic(condition, self.values) and self._turn():
                self.sequence(ts, body)
                arithmetic(step, self.values)
        else:
            name = ts[i + 1].text
            i += 2
            row: list[str] = []
            if i < len(ts) and ts[i].text == "in":
                i += 1
                while i < len(ts) and ts[i].kind == "word":
                    row += fields(ts[i].text, self.values) if act else []
                    i += 1
            else:
                row = list(self.values.positional)
            body = self._skip(ts, i, "do")
            for value in row:
                self.values.set(name, value)
                if not self._turn():
                    break
                self.sequence(ts, body)
        end, _ = self.sequence(ts, body, act=False)
        return self._skip(ts, end, "done"), True

    def _turn(self) -> bool:
        self.turns += 1
        return self.turns < TURNS_MAX

    def _while(self, ts: list[Token], i: int, act: bool) -> tuple[int, bool]:
        """A condition that would need something to be run counts as met at once, so that it ends."""
        wanted = ts[i].text == "while"
        start = i + 1
        turns = 0
        while act and self._turn():
            known = self._can_tell(ts, start)
            at, ok = self.sequence(ts, start)
            body = self._skip(ts, at, "do")
            if ok != wanted or (not known and (turns or not wanted)):
                break
            self.sequence(ts, body)
            turns += 1
        at, _ = self.sequence(ts, start, act=False)
        end, _ = self.sequence(ts, self._skip(ts, at, "do"), act=False)
        return self._skip(ts, end, "done"), True

    @staticmethod
    def _can_tell(ts: list[Token], i: int) -> bool:
        return ts[i].kind == "arith" or ts[i].text in {"[", "[[", "test"}

    def _if(self, ts: list[Token], i: int, act: bool) -> tuple[int, bool]:
        done = not act
        while True:
            at, ok = self.sequence(ts, i + 1, act=not done)
            body = self._skip(ts, at, "then")
            i, _ = self.sequence(ts, body, act=ok and not done)
            done = done or ok
            if i < len(ts) and ts[i].text == "elif":
                continue
            if i < len(ts) and ts[i].text == "else":
                i, _ = self.sequence(ts, i + 1, act=not done)
            return self._skip(ts, i, "fi"), True

    def _case(self, ts: list[Token], i: int, act: bool) -> tuple[int, bool]:
        """Only its default is followed: what else is chosen by is mostly how the script was called."""
        subject = text(ts[i + 1].text, self.values) if act else ""
        i = self._skip(ts, i + 2, "in")
        done = not act
        while i < len(ts) and ts[i].text != "esac":
            if ts[i].kind == "newline" or ts[i].text in {"(", ";;"}:
                i += 1
                continue
            patterns = []
            while i < len(ts) and ts[i].text != ")":
                patterns.append(text(ts[i].text, self.values))
                i += 1
            chosen = not done and any(p in {"*", subject} for p in patterns)
            i, _ = self.sequence(ts, i + 1, act=chosen)
            done = done or chosen
        return i + 1, True

    def _group(self, ts: list[Token], i: int, act: bool) -> tuple[int, bool]:
        end, ok = self.sequence(ts, i + 1, act=act)
        return self._skip(ts, end, "}"), ok

    def _function(self, ts: list[Token], i: int, act: bool) -> tuple[int, bool]:
        del act
        body = i + 4 if i + 2 < len(ts) and ts[i + 2].text == "(" else i + 2
        return self._define(ts[i + 1].text, ts, body)

    def _define(self, name: str, ts: list[Token], i: int) -> tuple[int, bool]:
        while i < len(ts) and ts[i].kind == "newline":
            i += 1
        self.functions[name] = (ts, i)
        return self.command(ts, i, act=False)

    def _simple(self, ts: list[Token], i: int, act: bool) -> tuple[int, bool]:
        line = ts[i].line
        words: list[str] = []
        here = ""
        while i < len(ts) and ts[i].kind in {"word", "op"}:
            t = ts[i]
            if t.kind == "op":
                if t.text not in {"<", ">", ">>", "<<", "<<-", "<<<", ">&", "<&", "&>", "&>>"}:
                    break
                if words and words[-1].isdigit():
                    words.pop()
                if t.text == "<<<" and i + 1 < len(ts):
                    here = ts[i + 1].text
                i += 2
                continue
            words.append(t.text)
            i += 1
        return i, self._do(words, here, line) if act else True

    def _do(self, words: list[str], here: str, line: int) -> bool:
        prefix: list[re.Match[str]] = []
        for word in words:
            found = ASSIGNMENT.match(word)
            if found is None:
                break
            prefix.append(found)
        words = words[len(prefix) :]
        if not words:
            for found in prefix:
                self._assign(found)
            return True
        env = {p[1]: text(p[4], self.values) for p in prefix}
        if words[0] in {"export", "local", "declare", "readonly", "typeset"}:
            self._declare(words)
            return True
        argv = [field for word in words for field in fields(word, self.values)]
        if not argv:
            return True
        return self._run(argv, env, here, line, {p[1]: p for p in prefix})

    def _run(
        self, argv: list[str], env: dict[str, str], here: str, line: int, prefix: "dict[str, re.Match[str]]"
    ) -> bool:
        name = argv[0]
        if name in self.functions and self.depth < DEPTH_MAX:
            for found in prefix.values():
                self._assign(found)
            ts, start = self.functions[name]
            kept, self.values.positional = self.values.positional, argv[1:]
            self.depth += 1
            _, ok = self.command(ts, start, act=True)
            self.depth -= 1
            self.values.positional = kept
            return ok
        if name in {"[", "[[", "test"}:
            return _test(argv[1:-1] if name != "test" else argv[1:])
        if name == "read":
            separators = env.get("IFS", " ")
            self._read(argv[1:], text(here, self.values), separators)
            return bool(here)
        if name in {"source", "."} and len(argv) > 1:
            beside = self.path.parent / argv[1]
            if beside.is_file() and self.depth < DEPTH_MAX:
                self.depth += 1
                self.script(beside)
                self.depth -= 1
            return True
        if name in {"true", ":"}:
            return True
        if name == "false":
            return False
        if name == "set" and "--" in argv:
            self.values.positional = argv[argv.index("--") + 1 :]
            return True
        if name == "unset":
            for gone in argv[1:]:
                self.values.own.pop(gone, None)
            return True
        if name == "shift":
            self.values.positional = self.values.positional[1:]
            return True
        self.commands.append(Command(tuple(argv), self.values.environment | env, self.path, line))
        return True

    def _assign(self, found: "re.Match[str]") -> None:
        name, index, more, raw = found.groups()
        v = self.values
        if raw.startswith("(") and raw.endswith(")"):
            items = [f for t in tokens(raw[1:-1]) if t.kind == "word" for f in fields(t.text, v)]
            v.arrays[name] = [*v.arrays.get(name, []), *items] if more else items
            v.own.pop(name, None)
        elif index is not None:
            held, at = v.arrays.setdefault(name, []), arithmetic(index, v)
            held += [""] * (at + 1 - len(held))
            held[at] = text(raw, v)
        else:
            value = text(raw, v)
            v.set(name, (v.get(name) or "") + value if more else value)

    def _declare(self, words: list[str]) -> None:
        for word in words[1:]:
            found = ASSIGNMENT.match(word)
            if found:
                self._assign(found)
            elif word.startswith("-"):
                continue
            name = found[1] if found else word
            if words[0] == "export":
                self.values.exported.add(name)
                if not found and (value := self.values.get(name)) is not None:
                    self.values.set(name, value)

    def _read(self, argv: list[str], line: str, separators: str) -> None:
        pieces = [p for p in re.split(f"[{re.escape(separators)}]" if separators else r"\s+", line) if p]
        names = [a for a in argv if not a.startswith("-")]
        if any(a.startswith("-") and "a" in a for a in argv) and names:
            self.values.arrays[names[-1]] = [p.strip() for p in pieces]
            return
        for n, name in enumerate(names):
            self.values.set(name, " ".join(pieces[n:]) if n == len(names) - 1 else "".join(pieces[n : n + 1]))


def _test(words: list[str]) -> bool:
    match words:
        case ["!", *rest]:
            return not _test(rest)
        case ["-n", value]:
            return value != ""
        case ["-z", value]:
            return value == ""
        case ["-z" | "-f" | "-d" | "-e" | "-x" | "-r"]:
            return words[0] == "-z"
        case []:
            return False
        case [a, "-lt" | "-le" | "-gt" | "-ge" | "-eq" | "-ne" as op, b]:
            signs = {"-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">=", "-eq": "==", "-ne": "!="}
            return bool(arithmetic(f"{a or 0} {signs[op]} {b or 0}", Values({})))
        case [a, "=" | "==", b]:
            return a == b
        case [a, "!=", b]:
            return a != b
    return True
