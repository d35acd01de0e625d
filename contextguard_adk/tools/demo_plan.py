"""What the demo's user asks about a source tree, and how the offline agent answers.

Everything follows from the tree alone, so two runs over one tree do the same work.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.testing.llm import Reply, call
from contextguard_adk.tools.file_tools import is_binary, name_in, walk_files

FILES_PER_TURN = 10

_SNIFFED_BYTES = 32_768
_MAX_LINE_CHARS = 200  # On average: more is generated or minified, and not read.
_MODIFIERS = r"^(?:(?:export|public|async|pub|abstract|static)[ \t]+)*"
_TYPE = re.compile(
    _MODIFIERS + r"(?:class|interface|struct|trait|enum|type)[ \t]+([A-Za-z]\w{3,60})",
    re.MULTILINE,
)
_FUNCTION = re.compile(
    _MODIFIERS + r"(?:def|func|fn|function)[ \t]+([A-Za-z]\w{3,60})", re.MULTILINE
)
_QUESTIONS = (
    "Find out how {symbol} works: search for it and read {package}.",
    "Now summarise {package} for somebody who is new here.",
    "What would break in {package} if {symbol} changed its signature?",
    "Review {package}: which parts are hard to follow, and where is {symbol} used?",
)
_NOTE = "Noted: "


@dataclass(frozen=True)
class Turn:
    """One message of the user, and the tool calls that the offline agent makes for it.

    Attributes:
        question: What the user asks.
        calls: Tool names with their arguments, in order; an answer follows them.
    """

    question: str
    calls: tuple[tuple[str, dict[str, str]], ...]

    @property
    def steps(self) -> int:
        """The model calls that the turn takes: its tool calls and the answer."""
        return len(self.calls) + 1


@dataclass(frozen=True)
class _Source:
    name: str
    package: str
    size_bytes: int
    symbol: str
    defines: bool


def plan_turns(root: Path, max_steps: int) -> list[Turn]:
    """Plans the user's questions about the source files under a folder.

    Args:
        root: The folder.
        max_steps: The model calls of all turns together; the plan goes round the tree
            until it has as many.

    Returns:
        The turns; empty when the tree has no source file.
    """
    turns: list[Turn] = []
    steps_left = max_steps
    for number, sources in enumerate(itertools.cycle(_list_portions(root))):
        turn = _plan_turn(sources, number)
        if turn.steps >= steps_left:
            return [*turns, replace(turn, calls=turn.calls[: steps_left - 1])]
        turns.append(turn)
        steps_left -= turn.steps
    return turns


def _list_portions(root: Path) -> list[list[_Source]]:
    """Cuts the folders into what one turn reads; every folder has its turn in time."""
    rounds = itertools.zip_longest(
        *(
            [
                group[i : i + FILES_PER_TURN]
                for i in range(0, len(group), FILES_PER_TURN)
            ]
            for group in _group_sources(root)
        )
    )
    return [portion for portions in rounds for portion in portions if portion]


def _plan_turn(sources: Sequence[_Source], number: int) -> Turn:
    package = sources[0].package
    symbol = max(sources, key=lambda source: source.size_bytes).symbol
    where = "the top folder" if package == "." else f"the folder {package}"
    question = _QUESTIONS[number % len(_QUESTIONS)]
    return Turn(
        question=question.format(symbol=symbol, package=where),
        calls=(
            ("list_files", {"directory": package}),
            ("search", {"pattern": symbol}),
            *(("read_file", {"path": source.name}) for source in sources),
        ),
    )


def _group_sources(root: Path) -> list[list[_Source]]:
    """Groups the source files by folder, those that define most first."""
    root = root.resolve()
    groups: defaultdict[str, list[_Source]] = defaultdict(list)
    for file in walk_files(root):
        if source := _read_source(root, file):
            groups[source.package].append(source)

    def rank(group: list[_Source]) -> tuple[int, int, str]:
        # Bundled scripts are text as well, but define nothing by name.
        defining = sum(source.defines for source in group)
        return -defining, -len(group), group[0].package

    return sorted(groups.values(), key=rank)


def _read_source(root: Path, file: Path) -> _Source | None:
    """Looks into a file; None for what is empty, binary, unreadable or generated."""
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(_SNIFFED_BYTES)
    except OSError:
        return None
    lines = head.count(b"\n") + 1
    if not head.strip() or is_binary(head) or len(head) / lines > _MAX_LINE_CHARS:
        return None
    name = name_in(root, file)
    names = list_definitions(head.decode("utf-8", "replace"), 1)
    symbol = names[0] if names else Path(name).stem
    return _Source(name, name_in(root, file.parent), size_bytes, symbol, bool(names))


def list_definitions(text: str, max_names: int) -> list[str]:
    """Returns what a source text defines at its left margin, types first."""
    found = itertools.chain(_TYPE.finditer(text), _FUNCTION.finditer(text))
    return [match[1] for match in itertools.islice(found, max_names)]


class OfflineAgent:
    """The script of the offline model: it works off one turn after the other.

    It knows its plan, as a model knows its task, but what it notes and answers is
    taken from the request in front of it.
    """

    def __init__(self) -> None:
        self._steps: Iterator[tuple[str, dict[str, str]]] = iter(())

    def begin(self, turn: Turn) -> None:
        """Takes up a turn."""
        self._steps = iter(turn.calls)

    def __call__(self, request: LlmRequest) -> Reply:
        """Notes what the last tool returned, and calls the next one or answers."""
        note = _note_result(request.contents[-1])
        if (step := next(self._steps, None)) is None:
            notes = [*_list_notes(request.contents), note]
            return "What I found:\n" + "\n".join(f"- {text}" for text in notes if text)
        name, arguments = step
        text = _NOTE + note if note else "I carry on."
        return [types.Part(text=text), call(name, **arguments)]


def _note_result(content: types.Content) -> str:
    """Says in one line what a tool result holds; "" where there is none."""
    for part in content.parts or ():
        if part.function_response:
            return _note_answer(part.function_response.response or {})
    return ""


def _note_answer(answer: dict[str, Any]) -> str:
    if "content" in answer:
        text = str(answer["content"])
        names = ", ".join(list_definitions(text, 6)) or "nothing by name"
        lines = text.count("\n") + 1
        return f"{answer.get('path')} has {lines} lines and defines {names}."
    if "entries" in answer:
        count = len(answer["entries"])
        return f"{answer.get('directory')} has {count} entries."
    if "matches" in answer:
        files = {str(match).partition(":")[0] for match in answer["matches"]}
        names = ", ".join(sorted(files)[:4]) or "no file"
        return f"{len(answer['matches'])} lines match, in {names}."
    return f"That did not work: {answer.get('error')}."


def _list_notes(contents: Sequence[types.Content]) -> list[str]:
    """Returns the notes of this turn that are still in the request."""
    notes: list[str] = []
    for content in contents:
        for part in content.parts or ():
            text = part.text or ""
            if content.role == "user" and text:
                notes.clear()
            elif text.startswith(_NOTE):
                notes.append(text.removeprefix(_NOTE))
    return notes
