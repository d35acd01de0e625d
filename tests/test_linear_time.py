"""Whatever a text says, the time to read it is in proportion to its length."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import contextguard_adk
from contextguard_adk._history.credentials import hide_secrets, without_secrets
from contextguard_adk._history.extraction import read_values
from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._history.text import list_items
from contextguard_adk._history.transcript import fit_entries, render_entries
from contextguard_adk._history.truncation import Preview, Truncation, truncate_content
from contextguard_adk._measuring.budgets import excerpt, shorten_to_tokens
from contextguard_adk._measuring.calibration import token_counter
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._providers import overflow, wordings
from contextguard_adk._providers.calling import is_transient
from contextguard_adk._providers.refusals import parse_refusal
from contextguard_adk._providers.registry import LitellmRegistry
from contextguard_adk._recall.search import rank_items
from contextguard_adk._runtime.state import PIN_KEY, AgentState
from contextguard_adk._sections.done import DoneCalls
from contextguard_adk._sections.todos import read_todos, render_todos
from contextguard_adk._sections.user_messages import condense
from contextguard_adk._summaries.judge import Answer, judge
from contextguard_adk._support.phrases import (
    quote,
    quote_line,
    quote_stored,
    quote_value,
)
from contextguard_adk._support.redaction import Redactor
from contextguard_adk.errors import UnusableAnswerError
from tests.builders import call, response, user
from tests.hostile import MAX_RATIO, UNITS, find_beginnings, find_growth, repeat

PACKAGE = Path(contextguard_adk.__file__).parent
METHODS = {
    **{name: name for name in ("search", "match", "fullmatch", "finditer")},
    **dict.fromkeys(("findall", "split", "sub", "subn"), "finditer"),
}
"""Methods of a pattern, and which of them does the same to a text."""


@dataclass(frozen=True)
class Source:
    """A module of the package, as text and as it was imported."""

    name: str
    tree: ast.Module
    module: ModuleType


@cache
def read_sources() -> list[Source]:
    """Every module that speaks of regular expressions."""
    sources = []
    for path in sorted(PACKAGE.rglob("*.py")):
        steps = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(("contextguard_adk", *steps)).removesuffix(".__init__")
        tree = ast.parse(path.read_text("utf-8"))
        if any(_imports_re(node) for node in ast.walk(tree)):
            sources.append(Source(name, tree, importlib.import_module(name)))
    return sources


def _imports_re(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        assert node.module != "re", "patterns are found by the name `re`"
    names = node.names if isinstance(node, ast.Import) else []
    return any(alias.name == "re" for alias in names)


def _compile_every_wording() -> Iterator[re.Pattern[Any]]:
    for value in vars(wordings).values():
        is_wordings = isinstance(value, tuple) and value
        if is_wordings and all(isinstance(each, str) for each in value):
            yield from wordings.compile_wordings(value)


BUILT: dict[str, Callable[[], Iterable[re.Pattern[Any]]]] = {
    "_providers.wordings.compile_wordings": _compile_every_wording,
    # What these build stands in names of the module.
    "_providers.refusals": tuple,
    "_support.phrases._compile": tuple,
}
"""By module and function: patterns that no expression of the module gives."""

EXAMPLES = {
    "_sections.values._stands_in": {"value": "a1-a1"},
    "_recall.search._compile_candidates": {"openings": "a1|b2"},
    "_recall.search._count_in_text": {"term": "a1-a1"},
}
"""By module and function: values of names that only the function has."""


@cache
def find_patterns() -> dict[str, list[tuple[re.Pattern[Any], frozenset[str]]]]:
    """Every pattern of each module, and the methods that it is used with."""
    used = _find_uses()
    found = {}
    for source in read_sources():
        patterns = dict[re.Pattern[Any], set[str]]()
        for value in vars(source.module).values():
            for pattern in _walk_patterns(value):
                patterns.setdefault(pattern, set())
        for made, place in _walk_calls(source.tree, ""):
            for pattern, methods in _obtain(source, made, place):
                patterns.setdefault(pattern, set()).update(methods)

        every = {"search", "finditer"}
        found[source.name] = [
            (pattern, frozenset(methods | used.get(pattern, set()) or every))
            for pattern, methods in patterns.items()
        ]
    return found


def _find_uses() -> dict[re.Pattern[Any], set[str]]:
    """The methods by which patterns are used that have a name."""
    used = dict[re.Pattern[Any], set[str]]()
    for source in read_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                pattern = vars(source.module).get(node.value.id)
                if isinstance(pattern, re.Pattern) and node.attr in METHODS:
                    used.setdefault(pattern, set()).add(METHODS[node.attr])
    return used


def _walk_patterns(value: object, depth: int = 0) -> Iterator[re.Pattern[Any]]:
    """Yields the patterns in a value, also those in containers and classes."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict) and depth < 3:
        for each in value.values():
            yield from _walk_patterns(each, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset) and depth < 3:
        for each in value:
            yield from _walk_patterns(each, depth + 1)
    elif isinstance(value, type) and value.__module__.startswith("contextguard_adk"):
        yield from _walk_patterns(dict(vars(value)), depth + 1)


def _walk_calls(node: ast.AST, place: str) -> Iterator[tuple[ast.Call, str]]:
    """Yields what gives `re` a pattern, and the function in which it stands."""
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f".{child.name}"
        yield from _walk_calls(child, inner)
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            owner = child.func.value
            is_re = isinstance(owner, ast.Name) and owner.id == "re"
            if is_re and child.func.attr in (*METHODS, "compile"):
                yield child, place


def _obtain(
    source: Source, made: ast.Call, place: str
) -> Iterator[tuple[re.Pattern[Any], set[str]]]:
    """Yields what a call of `re` compiles; fails where nobody says how to get at it."""
    assert isinstance(made.func, ast.Attribute)
    where = source.name.removeprefix("contextguard_adk.") + place
    if where in BUILT:
        for pattern in BUILT[where]():
            yield pattern, set()
        return

    names = {**vars(source.module), **EXAMPLES.get(where, {})}
    given = made.args[1] if made.func.attr == "compile" and made.args[1:] else None
    for keyword in made.keywords:
        given = keyword.value if keyword.arg == "flags" else given
    try:
        flags = 0 if given is None else _evaluate(given, names)
        pattern = re.compile(_evaluate(made.args[0], names), flags)
    except NameError as error:
        pytest.fail(
            f"{where}, line {made.lineno}: {error}. Give the pattern a name in its "
            "module, or say in BUILT or EXAMPLES how this test gets at it."
        )
    is_use = made.func.attr in METHODS
    yield pattern, {METHODS[made.func.attr]} if is_use else set()


def _evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    code = compile(ast.Expression(node), "<pattern>", "eval")
    return eval(code, names)


def read_by(pattern: re.Pattern[Any], method: str) -> Callable[[str], object]:
    """What reads a text as the package does by this method."""

    def read(text: str) -> None:
        given = text.encode() if isinstance(pattern.pattern, bytes) else text
        if method == "finditer":
            for _ in pattern.finditer(given):
                pass
        else:
            getattr(pattern, method)(given)

    return read


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", [source.name for source in read_sources()], ids=lambda name: name[17:]
)
def test_patterns_take_linear_time(module: str) -> None:
    """Each pattern of a module reads hostile texts in proportion to their length."""
    slow = []
    for pattern, methods in find_patterns()[module]:
        for unit in (*UNITS, *find_beginnings(pattern)):
            for method in methods:
                growth = find_growth(read_by(pattern, method), unit)
                if growth > MAX_RATIO:
                    slow.append((pattern.pattern, method, unit, growth))
            if slow:
                break

    assert not slow


COUNT = token_counter(None)
LOOP_UNITS = (
    "---\n",
    "| --- | --- |\n",
    "\n \n",
    "   ",
    "\u2028",
    "a",
    "a_",
    "[",
    "`",
    "\\",
    "1",
    "1 ",
    "1,111",
    "none\n",
    "a: ",
    'key="',
    "://",
    "a/",
    "中。",
    "한글",
    "deadbeef",
    "Do a1 now. ",
    "[System: ",
    "\n[Previous conversation summary]",
    "maximum context length is 999 ",
    "-latest",
    "4111 1111 1111 1111\n",
)


def judged(text: str, shown: str = "", **fields: Any) -> str:
    """What is used of an answer after a transcript; why none is."""
    answer = Answer(text.strip("\0\n "), **fields)
    try:
        return judge(answer, 1_000, True, shown).text
    except UnusableAnswerError as error:
        return str(error)


def split(text: str) -> list[str]:
    """Short pieces of a text."""
    return [text[start : start + 200] for start in range(0, len(text), 200)]


def nest(text: str) -> dict[str, object]:
    """A payload of many short texts."""
    return {"items": [{f"name{i}": each} for i, each in enumerate(split(text))]}


def read_errors(text: str) -> None:
    """Reads what a provider says; it may quote the request."""
    error = RuntimeError(text)
    overflow.parse_overflow(error)
    overflow.parse_overflow(error, [user(text)])
    parse_refusal(error, [user(text)])
    is_transient(error)


def read_state(text: str) -> None:
    """Reads session state that anybody may have written."""
    names = ("summary", "record", "scopes", "last_heuristic")
    state: dict[str, Any] = {f"context_guard:{name}:a": text for name in names}
    todos = [{"content": line} for line in text.splitlines()[:1_000]]
    state |= {"context_guard:todos:a": todos, f"{PIN_KEY}a:{text}": text}
    own = AgentState(state, "a", is_namespaced=True)
    own.load_summary("")
    own.find(PIN_KEY)
    render_todos(read_todos(own), 1_000, COUNT)


def shorten_transcript(text: str) -> None:
    """Writes a transcript, and shortens it."""
    contents = [
        user(text),
        *(user(line) for line in split(text)),
        response("read", text),
    ]
    fit_entries(render_entries(contents, range(len(contents))), 2_000, COUNT)


def list_done(text: str) -> None:
    """Lists a call with long arguments."""
    asked = call("read", text=text, nested=nest(text))
    contents = [asked, response("read", text)]
    DoneCalls().tell_left_out(contents, range(2), 2_000, COUNT, Memo())


def search(text: str) -> None:
    """Searches what was left out for a part of it."""
    contents = [user(text), response("read", text)]
    matches = rank_items(list_items(contents, range(2)), text[:400])
    [match.position for match in matches]


LOOPS: dict[str, Callable[[str], object]] = {
    "judge": judged,
    "judge-cut": lambda text: judged(text, text, finish="MAX_TOKENS"),
    "judge-question": lambda text: judged("Which rows?", text),
    "judge-echo": lambda text: judged(f"user:\n  {text}", f"user:\n  {text}"),
    "judge-json": lambda text: judged(f"```json\n[{text}]", text),
    "quote": quote,
    "quote_stored": quote_stored,
    "quote_line": quote_line,
    "quote_value": lambda text: quote_value(nest(text)),
    "shorten_to_tokens": lambda text: shorten_to_tokens(text, 1_000, COUNT),
    "excerpt": lambda text: excerpt(text, 1_000),
    "errors": read_errors,
    "windows": LitellmRegistry().context_window,
    "redaction": lambda text: Redactor(str.upper).redact_text(text),
    "read_values": read_values,
    "read_values-nested": lambda text: read_values(nest(text)),
    "hide_secrets": hide_secrets,
    "without_secrets": lambda text: without_secrets({text: nest(text)}),
    "truncation": lambda text: truncate_content(
        response("read", text), Truncation.in_the_middle(4_000, 4_000)
    ),
    "truncation-nested": lambda text: truncate_content(
        response("read", nest(text)), Truncation.in_the_middle(4_000, 4_000)
    ),
    "preview": lambda text: Preview(max_tokens=5_000)(response("read", text)),
    "transcript": shorten_transcript,
    "search": search,
    "condense": lambda text: condense((text, text[1:]), 4_000),
    "condense-many": lambda text: condense(tuple(split(text)), 4_000),
    "done": list_done,
    "fingerprint": lambda text: fingerprint(response("read", nest(text))),
    "measure": lambda text: Memo().estimate_tokens(
        [user(text), response("read", nest(text))]
    ),
    "state": read_state,
}
"""What else reads texts from outside."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_loops_take_linear_time(name: str) -> None:
    """What reads a text, other than by a pattern, does so in proportion to it."""
    slow = []
    for unit in LOOP_UNITS:
        growth = find_growth(LOOPS[name], unit)
        if growth > MAX_RATIO:
            slow.append((unit, growth))
    assert not slow


@pytest.mark.parametrize("unit", ["| --- | --- |\n", "---\n", "\n \n", "none\n- "])
def test_summary_that_loops_is_judged_as_one(unit: str) -> None:
    """An answer that ends in the same line without end stays the summary that it is."""
    said = "## Current State\nRows 1 to 9 were read.\n"
    judged_text = judged(said + repeat(unit, 200_000))
    assert judged_text.startswith(said)
    assert find_growth(lambda text: judged(said + text), unit) <= MAX_RATIO


@pytest.mark.parametrize("unit", ["---\n", "none\n", "## Done\nNone.\n\n", "| | |\n"])
def test_loop_without_a_word_is_no_summary(unit: str) -> None:
    """Rules, rows, headings and the word None say nothing, however long they are."""
    looped = unit * (200_000 // len(unit))
    assert judged(f"## Current State\n{looped}") == "the answer is no summary"


def test_question_after_long_words_is_judged_in_linear_time() -> None:
    """What was shown is read once to find out whether a question names any of it."""
    word = "ab_cd_"
    shown = f"x12 row 17 {word * 2_000}"
    assert judged("Which rows?", shown) == "the answer is a question"
    assert judged("Is it row 17, x12 or y3?", shown).startswith("Is it")
    assert find_growth(lambda text: judged("Which rows?", text), word) <= MAX_RATIO


def test_status_of_many_digits_is_none() -> None:
    """Python refuses to read so long a number; the failure is as any other."""
    error = RuntimeError("refused")
    error.code = "4" * 5_000  # type: ignore[attr-defined]
    assert not is_transient(error)


def test_every_pattern_is_found() -> None:
    """A new pattern is read from hostile texts without anybody listing it."""
    found = find_patterns()
    assert all(found[source.name] for source in read_sources())
