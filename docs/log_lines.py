"""Writes the table of log lines in docs/on-call.md from the source of the package.

    python docs/log_lines.py

The table has each line at WARNING and above. What a line means stands in the last
column; it is written by hand, and stays when the table is written anew.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("on-call.md")
PACKAGE = Path(__file__).parent.parent / "contextguard_adk"
TABLE = re.compile(r"(<!-- log lines -->\n).*?(<!-- end -->)", re.DOTALL)
ROW = re.compile(r"^\| (?:WARNING|ERROR) \| `` (.+?) `` \| (.*) \|$", re.MULTILINE)

PLACES = re.compile(r"%(?:\.\d+)?[a-z]")
"""The `%` places of a message."""

DIRECT = {
    "warning": "WARNING",
    "error": "ERROR",
    "exception": "ERROR",
    "critical": "ERROR",
}
"""The methods of a logger, with the level of their lines."""

MESSAGE_POSITION = {
    "warn_once": 1,
    "log_failure": 1,
    "log_failures": 1,
    "_log_failures": 0,
}
"""The position of the message among the arguments of the package's own functions."""


Values = dict[str, list[ast.expr]]
"""By a name, what is assigned to it."""


class Line(NamedTuple):
    """A line of the log, with "…" for what differs."""

    level: str
    text: str


def list_lines() -> list[Line]:
    """Lists the lines of the package, errors first."""
    paths = sorted(PACKAGE.rglob("*.py"))
    modules = {path: ast.parse(path.read_text("utf-8")) for path in paths}
    # A constant may be imported from another module.
    constants = Values()
    for module in modules.values():
        constants.update(_find_values(module))

    lines = set[Line]()
    for path, module in modules.items():
        if path.name != "log.py":  # It has the functions that write lines of others.
            lines |= set(_list_lines_of(module, constants))
    return sorted(lines)


def _list_lines_of(module: ast.Module, constants: Values) -> Iterator[Line]:
    """Yields the lines of a module; `constants` are those of the whole package."""
    own_constants = _find_values(module)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    scopes = [node for node in ast.walk(module) if isinstance(node, functions)]
    for scope in [*scopes, module]:
        for call in _list_calls(scope):
            level, message = _read_call(call)
            if message is None:
                continue
            # A name may be bound anew for a later line.
            local = {
                name: [each for each in values if each.lineno < call.lineno]
                for name, values in _find_values(scope).items()
            }
            resolver = Resolver([local, own_constants, constants])
            texts = resolver.list_texts(message)
            yield from (Line(level, _shorten(text)) for text in texts)


def _find_values(scope: ast.AST) -> Values:
    """Returns what is assigned to each name in a function or a module."""
    found = Values()
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
    return found


def _list_calls(scope: ast.AST) -> Iterator[ast.Call]:
    """Yields the calls in a function, or in a module outside its functions."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.Call):
            yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _list_calls(child)
        else:
            for decorator in child.decorator_list:
                yield from _list_calls(ast.Expr(decorator))


def _read_call(call: ast.Call) -> tuple[str, ast.expr | None]:
    """Returns the level and the message of a call; no message if it logs nothing."""
    name = ""
    if isinstance(call.func, ast.Attribute):
        name = call.func.attr
        is_of_logger = "log" in ast.unparse(call.func.value).lower()
        if is_of_logger and name in DIRECT:
            return DIRECT[name], call.args[0]
    elif isinstance(call.func, ast.Name):
        name = call.func.id

    if name not in MESSAGE_POSITION:
        return "", None
    has_level = any(each.arg == "level" for each in call.keywords)
    if name == "warn_once":
        level = "ERROR" if has_level else "WARNING"
    elif name == "log_failure" and has_level:
        level = "WARNING"  # The first failure of a listener.
    else:
        level = "ERROR"
    return level, call.args[MESSAGE_POSITION[name]]


class Resolver(NamedTuple):
    """Finds the texts that an expression may have.

    Attributes:
        scopes: What is assigned to names: in a function, its module, and the package.
    """

    scopes: list[Values]

    def list_texts(self, message: ast.expr) -> list[str]:
        """Returns the texts of an expression."""
        if isinstance(message, ast.Constant):
            return [str(message.value)]
        if isinstance(message, ast.JoinedStr):
            return self._join([self._list_part_texts(part) for part in message.values])
        if isinstance(message, ast.BinOp):
            sides = (message.left, message.right)
            return self._join([self.list_texts(side) for side in sides])
        values = self._list_values(message.id) if isinstance(message, ast.Name) else []
        if not values:
            text = ast.unparse(message)
            raise ValueError(f"line {message.lineno}: {text} is no message")
        return [text for each in values for text in self.list_texts(each)]

    def _list_part_texts(self, part: ast.expr) -> list[str]:
        """Returns the texts of a part of an f-string; "%s" for what is not constant."""
        if isinstance(part, ast.FormattedValue):
            value = part.value
            is_constant = isinstance(value, ast.Name) and value.id.isupper()
            return self.list_texts(value) if is_constant else ["%s"]
        return self.list_texts(part)

    def _join(self, parts: list[list[str]]) -> list[str]:
        return ["".join(texts) for texts in itertools.product(*parts)]

    def _list_values(self, name: str) -> list[ast.expr]:
        """Returns what is assigned to a name, in the first scope that assigns it."""
        found = [scope[name] for scope in self.scopes if scope.get(name)]
        return found[0] if found else []


def _shorten(text: str) -> str:
    """Puts "…" in the places of a message, in one line for a table."""
    with_dots = PLACES.sub("…", text).replace("%%", "%").replace("……", "…")
    return " ".join(with_dots.split()).replace("|", "\\|")


def update(page: str) -> str:
    """Returns a page with the table of today; a new line has an empty last column."""
    known = dict(ROW.findall(page))
    rows = ["| level | line | what it means, and what to do |", "|---|---|---|"]
    rows += [
        # Two backticks, because a line may have single ones.
        f"| {line.level} | `` {line.text} `` | {known.get(line.text, '')} |"
        for line in list_lines()
    ]
    table = "\n".join(rows)
    return TABLE.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text("utf-8")), "utf-8")
