"""What a shell makes of a word: parameters, arithmetic, `seq`, quotes. Nothing is run."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from eccon.scripts.lexer import closing

__all__ = ["Values", "arithmetic", "fields", "text"]

_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b) if b else 0,
    ast.Mod: lambda a, b: a % b if b else 0,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
SEQ_MAX = 4096


class Values:
    """A script's variables: its own over those it inherits; arrays; positional parameters."""

    def __init__(self, inherited: Mapping[str, str]) -> None:
        self.own: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self.exported: set[str] = set()
        self.positional: list[str] = []
        self._inherited = inherited
        self.guessed: set[str] = set()
        """What would have been run to get a value; it was taken as empty."""

    def get(self, name: str) -> str | None:
        """None when it is not set."""
        if name.isdigit():
            i = int(name)
            return self.positional[i - 1] if 0 < i <= len(self.positional) else None
        if name == "#":
            return str(len(self.positional))
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else None
        return self.own.get(name, self._inherited.get(name))

    def set(self, name: str, value: str) -> None:
        """As `NAME=value`."""
        self.arrays.pop(name, None)
        self.own[name] = value

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is set within is forgotten after, as in a subshell."""
        kept = self.own.copy(), {k: v.copy() for k, v in self.arrays.items()}, self.exported.copy()
        try:
            yield
        finally:
            self.own, self.arrays, self.exported = kept

    @property
    def environment(self) -> dict[str, str]:
        """What a command started here would have beyond what the script itself inherited."""
        return {n: v for n in sorted(self.exported) if (v := self.own.get(n)) is not None}


def arithmetic(expression: str, values: Values) -> int:
    """What `$((expression))` is; 0 where it cannot be told. Assignments take place."""
    e = expression.strip()
    if step := re.fullmatch(r"(\w+)\s*(\+\+|--)|(\+\+|--)\s*(\w+)", e):
        name = step[1] or step[4]
        before = arithmetic(name, values)
        after = before + (1 if "++" in e else -1)
        values.set(name, str(after))
        return before if step[1] else after
    if assign := re.fullmatch(r"(\w+)\s*([-+*/]?)=(?!=)\s*(.*)", e, re.DOTALL):
        name, op, rest = assign[1], assign[2], assign[3]
        value = arithmetic(f"{name} {op} ({rest})" if op else rest, values)
        values.set(name, str(value))
        return value
    plain = text(e.replace('"', ""), values) if "$" in e else e
    try:
        return _evaluate(ast.parse(plain.strip() or "0", mode="eval").body, values)
    except (SyntaxError, ValueError, RecursionError):
        return 0


def _evaluate(node: ast.AST, values: Values) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            held = values.get(name) or "0"
            return int(held) if re.fullmatch(r"-?\d+", held.strip()) else 0
        case ast.BinOp(left=a, op=op, right=b) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(a, values), _evaluate(b, values))
        case ast.Compare(left=a, ops=[op], comparators=[b]) if type(op) in _OPERATORS:
            return int(_OPERATORS[type(op)](_evaluate(a, values), _evaluate(b, values)))
        case ast.UnaryOp(op=ast.USub(), operand=a):
            return -_evaluate(a, values)
        case ast.Subscript(value=ast.Name(id=name), slice=index):
            row = values.arrays.get(name, [])
            i = _evaluate(index, values)
            return int(row[i]) if i < len(row) and row[i].isdigit() else 0
    raise ValueError


def text(word: str, values: Values) -> str:
    """The word as one string, as in an assignment."""
    return " ".join(fields(word, values, split=False))


def fields(word: str, values: Values, *, split: bool = True) -> list[str]:
    """The words that it becomes."""
    if split and (braces := re.fullmatch(r"\{(-?\d+)\.\.(-?\d+)\}", word)):
        a, b = int(braces[1]), int(braces[2])
        return [str(n) for n in range(a, b + 1)] if b >= a else [str(n) for n in range(a, b - 1, -1)]
    return _Expansion(values, split).run(word)


class _Expansion:
    def __init__(self, values: Values, split: bool) -> None:
        self.values = values
        self.split = split
        self.done: list[str] = []
        self.now = ""
        self.started = False

    def run(self, word: str) -> list[str]:
        i, quoted = 0, False
        while i < len(word):
            c = word[i]
            if c == "'" and not quoted:
                end = word.index("'", i + 1)
                self._add(word[i + 1 : end])
                self.started = True
                i = end + 1
            elif c == '"':
                quoted = not quoted
                self.started = True
                i += 1
            elif c == "\\" and i + 1 < len(word):
                following = word[i + 1]
                self._add(following if not quoted or following in '$`"\\\n' else c + following)
                i += 2
            elif c == "$" and i + 1 < len(word):
                i = self._dollar(word, i, quoted)
            elif c == "`":
                end = (word + "`").index("`", i + 1)
                self._substituted(word[i + 1 : end], quoted)
                i = end + 1
            else:
                self._add(c)
                i += 1
        if self.started:
            self.done.append(self.now)
        return self.done

    def _add(self, piece: str) -> None:
        self.now += piece
        self.started = self.started or bool(piece)

    def _expanded(self, value: str, quoted: bool) -> None:
        """A value, split at blanks where it stands outside quotes."""
        if quoted or not self.split:
            self._add(value)
            return
        parts = value.split()
        for n, part in enumerate(parts):
            if n or (value[:1].isspace() and self.started):
                self._end()
            self._add(part)
        if parts and value[-1:].isspace():
            self._end()

    def _end(self) -> None:
        if self.started:
            self.done.append(self.now)
        self.now, self.started = "", False

    def _list(self, items: list[str], quoted: bool) -> None:
        """`"$@"`: each a word of its own."""
        for n, item in enumerate(items):
            if n:
                if self.split:
                    self._end()
                else:
                    self.now += " "
            self._expanded(item, quoted)

    def _dollar(self, word: str, i: int, quoted: bool) -> int:
        if word.startswith("$((", i):
            end = closing(word, i + 1)
            self._add(str(arithmetic(word[i + 3 : end - 2], self.values)))
            return end
        if word.startswith("$(", i):
            end = closing(word, i + 1)
            self._substituted(word[i + 2 : end - 1], quoted)
            return end
        if word.startswith("${", i):
            end = closing(word, i + 1)
            self._parameter(word[i + 2 : end - 1], quoted)
            return end
        if word.startswith("$'", i) and not quoted:
            end = word.index("'", i + 2)
            self._add(word[i + 2 : end].replace("\\n", "\n").replace("\\t", "\t"))
            return end + 1
        found = re.compile(r"\$(\w+|[@#*?$!-])").match(word, i)
        if found is None:
            self._add("$")
            return i + 1
        name = found[1] if not found[1][:1].isdigit() else found[1][0]
        self._parameter(name, quoted)
        return i + 1 + len(name)

    def _parameter(self, inside: str, quoted: bool) -> None:
        v = self.values
        if inside in {"@", "*"}:
            self._list(v.positional, quoted)
            return
        if counted := re.fullmatch(r"#(\w+)(\[[@*]\])?", inside):
            held = v.arrays.get(counted[1], [])
            self._add(str(len(held) if counted[2] else len(v.get(counted[1]) or "")))
            return
        element = re.match(r"(\w+)\[(.+?)\](.*)$", inside, re.DOTALL)
        if element and element[2] in {"@", "*"}:
            self._list(v.arrays.get(element[1], []), quoted)
            return
        found = re.match(r"!?(\w+|[#?$!-])(.*)$", inside, re.DOTALL)
        if element:
            held, index = v.arrays.get(element[1], []), arithmetic(element[2], v)
            value, rest = (held[index] if -len(held) <= index < len(held) else None), element[3]
            name = element[1]
        elif found:
            name, rest = found[1], found[2]
            value = v.get(name)
        else:
            return
        self._expanded(self._modified(name, value, rest), quoted)

    def _modified(self, name: str, value: str | None, rest: str) -> str:
        change = re.match(r"(:?[-=?+])(.*)$", rest, re.DOTALL)
        if change is None:
            return _trimmed(value or "", rest, self.values)
        absent = value is None or (change[1].startswith(":") and value == "")
        other = text(change[2], self.values)
        if change[1].endswith("+"):
            return "" if absent else other
        if absent and change[1].endswith("="):
            self.values.set(name, other)
        return other if absent else value or ""

    def _substituted(self, command: str, quoted: bool) -> None:
        words = command.split()
        if words[:1] == ["seq"]:
            numbers = [arithmetic(text(w, self.values), self.values) for w in _words(command)[1:]]
            if 1 <= len(numbers) <= 3:
                first, step, last = ([1, 1, *numbers], [numbers[0], 1, numbers[-1]], numbers)[
                    len(numbers) - 1
                ]
                row = range(first, last + (1 if step > 0 else -1), step or 1)
                self._expanded("\n".join(map(str, row[:SEQ_MAX])), quoted)
                return
        self.values.guessed.add(command.strip())


def _words(command: str) -> list[str]:
    """Split at blanks outside brackets: `seq 0 $((N - 1))` has three."""
    found, i = [], 0
    while i < len(command):
        if command[i].isspace():
            i += 1
            continue
        start = i
        while i < len(command) and not command[i].isspace():
            i = closing(command, i + 1) if command.startswith(("$(", "${"), i) else i + 1
        found.append(command[start:i])
    return found


def _trimmed(value: str, rest: str, values: Values) -> str:
    """`${x%suffix}`, `${x#prefix}` and `${x//from/to}` without patterns; any other change is not made."""
    if change := re.match(r"(//?)([^/]+)(?:/(.*))?$", rest, re.DOTALL):
        old, new = text(change[2], values), text(change[3] or "", values)
        return value.replace(old, new, -1 if change[1] == "//" else 1)
    if cut := re.match(r"(%%?|##?)(.*)$", rest, re.DOTALL):
        piece = text(cut[2], values)
        return value.removesuffix(piece) if cut[1][0] == "%" else value.removeprefix(piece)
    if part := re.match(r":(\d+)(?::(\d+))?$", rest):
        start = int(part[1])
        return value[start : start + int(part[2])] if part[2] else value[start:]
    return value
