"""Small mistakes in the package, made on purpose: which of them do the tests notice?

    COVERAGE_FILE=lines.coverage pytest --cov --cov-context=test --cpu-times=cpu.tsv
    python .ci/mutants.py make lines.coverage > mutants.jsonl
    python .ci/mutants.py run mutants.jsonl cpu.tsv > noticed.jsonl

`make` takes the same lines for the same code and seed, of those that a test runs. `run`
changes the files of this checkout: it makes one mistake at a time, runs the tests of
its line until one fails, those that take the least CPU first, and takes it back.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from coverage import CoverageData

PACKAGE = Path("contextguard_adk")
FOLDERS = (
    "_core",
    "_turn",
    "_history",
    "_summaries",
    "_sections",
    "_shapes",
    "_measuring",
    "_providers",
)
SEED = 42
COUNT = 40
BATCHES = (60, 400, 10_000)
"""How many tests each run of pytest has: most mistakes are noticed by the first few."""

TIMEOUT_SECONDS = 1_800
"""What takes longer has got into a loop that does not end, and is noticed."""

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
}

Mutant = dict[str, Any]


def change(node: ast.AST) -> ast.AST | None:
    """An expression with one mistake; None for one in which none is made."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            other: Any = OPERATORS[type(operator)]()
            return ast.Compare(left, [other], [right])
        case ast.BoolOp(op=operator, values=values):
            other = OPERATORS[type(operator)]()
            return ast.BoolOp(other, values)
        case ast.BinOp(left=left, op=operator, right=right):
            if type(operator) not in OPERATORS:
                return None
            other = OPERATORS[type(operator)]()
            return ast.BinOp(left, other, right)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value)):
            return ast.Constant(value + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return ast.IfExp(test, orelse, body)
    return None


def list_mutants(path: Path, tests_of: dict[int, list[str]]) -> Iterator[Mutant]:
    """All mistakes in the expressions of one line that a test runs."""
    source = path.read_text("utf-8")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        changed = change(node)
        if changed is None or not isinstance(node, ast.expr):
            continue
        tests = tests_of.get(node.lineno)
        if not tests or node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1].encode()
        before = line[: node.col_offset].decode()
        after = line[node.end_col_offset :].decode()
        text = ast.unparse(ast.fix_missing_locations(changed))
        mutant = {
            "path": str(path),
            "line": node.lineno,
            "before": line.decode(),
            "after": f"{before}({text}){after}",
            "tests": tests,
        }
        if is_code(mutated_source(mutant)):
            yield mutant


def is_code(source: str) -> bool:
    """Whether it compiles: within an f-string some changes do not."""
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def mutated_source(mutant: Mutant) -> str:
    """The file with the mistake."""
    lines = Path(mutant["path"]).read_text("utf-8").split("\n")
    index = mutant["line"] - 1
    if lines[index] != mutant["before"]:
        sys.exit(f"{mutant['path']}:{mutant['line']} has changed since.")
    lines[index] = mutant["after"]
    return "\n".join(lines)


def make(coverage_file: str, seed: int, count: int) -> None:
    """Prints mutants, as many for each folder."""
    data = CoverageData(coverage_file)
    data.read()
    chance = random.Random(seed)
    for number, folder in enumerate(FOLDERS):
        found = list[Mutant]()
        for path in sorted((PACKAGE / folder).glob("*.py")):
            contexts = data.contexts_by_lineno(str(path.resolve()))
            tests_of = {
                line: sorted({each.split("|")[0] for each in names if each})
                for line, names in contexts.items()
            }
            found.extend(list_mutants(path, tests_of))
        share = count // len(FOLDERS) + (number < count % len(FOLDERS))
        for mutant in chance.sample(found, min(share, len(found))):
            print(json.dumps(mutant, ensure_ascii=False))


def run(mutants: Iterable[Mutant], cpu_seconds: dict[str, float]) -> None:
    """Prints each mutant with the test that noticed it, or with None."""
    for mutant in mutants:
        path = Path(mutant["path"])
        source = path.read_text("utf-8")
        tests = sorted(mutant.pop("tests"), key=lambda test: cpu_seconds.get(test, 1.0))
        path.write_text(mutated_source(mutant), "utf-8")
        try:
            mutant["noticed_by"] = find_failure(tests)
        finally:
            path.write_text(source, "utf-8")
        print(json.dumps(mutant, ensure_ascii=False), flush=True)


def find_failure(tests: list[str]) -> str | None:
    """The first test that fails; None if all pass."""
    for size in BATCHES:
        batch = tests[:size]
        tests = tests[size:]
        if not batch:
            return None
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
            names.write("\n".join(batch))
            names.flush()
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0"]
            command += ["-m", "not exhaustive", "--tb=no", "-p", "no:cacheprovider"]
            try:
                done = subprocess.run(
                    [*command, f"@{names.name}"],
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return "no end"
        if done.returncode == pytest.ExitCode.TESTS_FAILED:
            lines = done.stdout.splitlines()
            return next(line for line in lines if line.startswith(("FAILED", "ERROR")))
        if done.returncode == pytest.ExitCode.INTERRUPTED:
            return "a file of tests that cannot be imported"
        if done.returncode not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            sys.exit(
                f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
    return None


def read_cpu_seconds(path: str) -> dict[str, float]:
    """What `pytest --cpu-times` has written."""
    rows = (line.split("\t") for line in Path(path).read_text("utf-8").splitlines())
    return {test: float(seconds) for seconds, test in rows}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("coverage_file")
    making.add_argument("--seed", type=int, default=SEED)
    making.add_argument("--count", type=int, default=COUNT)
    running = commands.add_parser("run")
    running.add_argument("mutants_file")
    running.add_argument("cpu_times_file")
    given = parser.parse_args()
    if given.command == "make":
        make(given.coverage_file, given.seed, given.count)
        return
    lines = Path(given.mutants_file).read_text("utf-8").splitlines()
    run(map(json.loads, lines), read_cpu_seconds(given.cpu_times_file))


if __name__ == "__main__":
    main()
