"""Which lines that name something of google.adk ran with the newest, not the oldest?

    python .ci/adk_lines.py NEWEST.coverage OLDEST.coverage

With the oldest google-adk only the tests in `.ci/oldest-adk-tests.txt` run. Prints the
lines that they leave out and fails if there are any: then add the file of a test that
runs them. A line that only a newer google-adk can run says so in a comment, `# Newer
google-adk`, on it or above it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from coverage import CoverageData

PACKAGE = Path(__file__).parent.parent / "contextguard_adk"
ADK = "google.adk"
NEWER = "# Newer google-adk"


def list_adk_names(tree: ast.Module) -> set[str]:
    """The names that a module has imported from google.adk."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ADK):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def list_statements(tree: ast.Module) -> Iterator[tuple[range, bool]]:
    """The lines of each statement, of a compound one those before its body, and whether
    it names something of google.adk when it runs."""
    names = list_adk_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        end = body[0].lineno if body else (node.end_lineno or node.lineno) + 1
        lines = range(node.lineno, max(end, node.lineno + 1))
        yield lines, any(is_adk(part, names) for part in list_parts(node))


def list_parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """What a statement evaluates itself: no other statement, no annotation."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns"):
                continue
            children = value if isinstance(value, list) else [value]
            for child in children:
                if isinstance(child, ast.AST) and not isinstance(child, ast.stmt):
                    waiting.append(child)


def is_adk(node: ast.AST, names: set[str]) -> bool:
    """Whether a part imports from google.adk, or uses what was imported."""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith(ADK)
    return isinstance(node, ast.Name) and node.id in names


def read_lines(data_file: str) -> dict[str, set[int]]:
    """The lines that ran, by file."""
    data = CoverageData(data_file)
    data.read()
    return {path: {*(data.lines(path) or ())} for path in data.measured_files()}


def list_missing(
    path: Path, newest: set[int], oldest: set[int]
) -> Iterator[tuple[int, str]]:
    """The lines that ran with the newest google-adk alone."""
    text = path.read_text("utf-8")
    source = text.splitlines()
    for lines, has_adk in list_statements(ast.parse(text)):
        if not has_adk or newest.isdisjoint(lines) or not oldest.isdisjoint(lines):
            continue
        around = source[lines.start - 2 : lines.stop - 1]
        if not any(NEWER in line for line in around):
            yield lines.start, source[lines.start - 1].strip()


def main(newest_file: str, oldest_file: str) -> int:
    """Prints what is missing; returns 1 if there is any."""
    newest, oldest = read_lines(newest_file), read_lines(oldest_file)
    missing = [
        f"{path.relative_to(PACKAGE.parent)}:{number}: {line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in list_missing(
            path, newest.get(str(path), set()), oldest.get(str(path), set())
        )
    ]
    if not newest or not oldest:
        print("No lines were measured.")
        return 1
    if missing:
        print("Not run with the oldest google-adk, though they name something of it:")
        print("\n".join(missing))
        return 1
    print("Each line that names something of google.adk ran with the oldest, too.")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
