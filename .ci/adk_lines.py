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
from coverage.exceptions import CoverageException

PACKAGE = Path(__file__).resolve().parent.parent / "contextguard_adk"
ADK = "google.adk"
NEWER = "# Newer google-adk"


def list_adk_names(tree: ast.Module) -> set[str]:
    """The names that a module has imported from google.adk."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names.update(
                alias.asname or alias.name
                for alias in node.names
                if f"{node.module}.{alias.name}.".startswith(f"{ADK}.")
            )
        elif isinstance(node, ast.Import):
            names.update(
                alias.asname
                for alias in node.names
                if alias.asname and f"{alias.name}.".startswith(f"{ADK}.")
            )
    return names


def list_statements(tree: ast.Module) -> Iterator[tuple[range, bool]]:
    """The lines of each statement, of a compound one those before its body, and whether
    it names something of google.adk when it runs.

    A `case` and an `except` count as statements of their own.
    """
    names = list_adk_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.match_case):
            start = node.pattern.lineno
        elif isinstance(node, (ast.stmt, ast.ExceptHandler)):
            start = node.lineno
        else:
            continue
        body = getattr(node, "body", None)
        end = (
            body[0].lineno if body else (getattr(node, "end_lineno", None) or start) + 1
        )
        lines = range(start, max(end, start + 1))
        yield lines, any(is_adk(part, names) for part in list_parts(node))


def list_parts(statement: ast.AST) -> Iterator[ast.AST]:
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
                is_own = isinstance(
                    child, (ast.stmt, ast.ExceptHandler, ast.match_case)
                )
                if isinstance(child, ast.AST) and not is_own:
                    waiting.append(child)


def is_adk(node: ast.AST, names: set[str]) -> bool:
    """Whether a part imports from google.adk, or uses what was imported."""
    if isinstance(node, ast.ImportFrom):
        return any(
            f"{node.module}.{alias.name}.".startswith(f"{ADK}.") for alias in node.names
        )
    if isinstance(node, ast.Import):
        return any(f"{alias.name}.".startswith(f"{ADK}.") for alias in node.names)
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) == ADK
    return isinstance(node, ast.Name) and node.id in names


def read_lines(data_file: str) -> dict[Path, set[int]]:
    """The lines of the package that ran, by file; ends the script if there are none."""
    if not Path(data_file).is_file():
        sys.exit(f"{data_file}: there is no such file.")
    data = CoverageData(data_file)
    try:
        data.read()
    except CoverageException as error:
        sys.exit(f"{data_file} holds no coverage: {error}")
    lines = {
        Path(path): {*(data.lines(path) or ())}
        for path in data.measured_files()
        if Path(path).is_relative_to(PACKAGE)
    }
    if not any(lines.values()):
        sys.exit(f"{data_file}: no line of {PACKAGE} was measured.")
    return lines


def list_missing(
    path: Path, newest: set[int], oldest: set[int]
) -> Iterator[tuple[int, str]]:
    """The lines that ran with the newest google-adk alone."""
    text = path.read_text("utf-8")
    source = text.splitlines()
    for lines, has_adk in list_statements(ast.parse(text)):
        if not has_adk or newest.isdisjoint(lines) or not oldest.isdisjoint(lines):
            continue
        around = source[max(lines.start - 2, 0) : lines.stop - 1]
        if not any(NEWER in line for line in around):
            yield lines.start, source[lines.start - 1].strip()


def main() -> None:
    """Prints what is missing; ends with 1 if there is any."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    newest, oldest = map(read_lines, sys.argv[1:])
    missing = [
        f"{path.relative_to(PACKAGE.parent)}:{number}: {line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in list_missing(
            path, newest.get(path, set()), oldest.get(path, set())
        )
    ]
    if missing:
        print("Not run with the oldest google-adk, though they name something of it:")
        print("\n".join(missing))
        sys.exit(1)
    print("Each line that names something of google.adk ran with the oldest, too.")


if __name__ == "__main__":
    main()
