"""The demo's agent: its file tools, and the offline script that uses them.

Everything follows from the source tree alone, so two runs over one tree do the same
work.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.testing import Reply, call

MAX_READ_BYTES = 200_000
MAX_ENTRIES = 300
MAX_MATCHES = 100
MAX_MATCH_CHARS = 200
MAX_WALKED_FILES = 20_000
FILES_PER_TURN = 10

_SNIFFED_BYTES = 32_768
_MAX_LINE_CHARS = 200  # On average: more is generated or minified, and not read.
_DEFINITION = re.compile(
    r"^(?:(?:export|public|async|pub|abstract|static)[ \t]+)*"
    r"(?:class|interface|struct|trait|enum|type|def|func|fn|function)[ \t]+"
    r"([A-Za-z]\w{3,60})",
    re.MULTILINE,
)
_QUESTIONS = (
    "Find out how {symbol} works: search for it and read {package}.",
    "Now summarize {package} for somebody who is new here.",
    "What would break in {package} if {symbol} changed its signature?",
    "Review {package}: which parts are hard to follow, and where is {symbol} used?",
)

Answer = dict[str, Any]


def _answer_errors(tool: Callable[..., Answer]) -> Callable[..., Answer]:
    """Turns an error in a tool into an answer that the model can react to."""

    @functools.wraps(tool)
    def answer(*args: Any, **kwargs: Any) -> Answer:
        try:
            return tool(*args, **kwargs)
        except OSError as error:
            # The error's own text would say where the folder is.
            return {"error": error.strerror or type(error).__name__}
        except RuntimeError:  # How Python before 3.13 reports it.
            return {"error": "a loop of links"}
        except (TypeError, ValueError) as error:
            return {"error": str(error)}

    return answer


class FileTools:
    """Read-only tools for the files of one folder.

    What an agent asks for is untrusted: a path that leads out of the folder, by `..`,
    as an absolute path or through a symbolic link, is refused.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    @_answer_errors
    def list_files(self, directory: str = ".") -> dict[str, Any]:
        """Lists a folder; the names of subfolders end with a slash.

        Args:
            directory: The folder's path; "." is the top.
        """
        entries = [
            _clean_name(entry.name) + ("/" if entry.is_dir() else "")
            for entry in sorted(self._resolve(directory).iterdir())
            if not _is_skipped(entry.name)
        ]
        return {"directory": directory, "entries": entries[:MAX_ENTRIES]}

    @_answer_errors
    def read_file(self, path: str) -> dict[str, Any]:
        """Returns the text of a file.

        Args:
            path: The file's path from the top folder.
        """
        file = self._resolve(path)
        if not file.is_file():  # To read a pipe would take forever.
            raise ValueError(f"{path!r} is not a file")
        with file.open("rb") as stream:
            data = stream.read(MAX_READ_BYTES)
        if b"\0" in data:
            raise ValueError(f"{path!r} is a binary file")
        return {"path": path, "content": data.decode("utf-8", "replace")}

    @_answer_errors
    def search(self, pattern: str) -> dict[str, Any]:
        """Finds the lines of all files that contain a text.

        Args:
            pattern: The text itself, not a regular expression; case matters.
        """
        if not pattern:
            raise ValueError("the pattern must have at least one character")
        matches = itertools.islice(self._find_lines(pattern), MAX_MATCHES)
        return {"matches": list(matches)}

    def _resolve(self, path: str) -> Path:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"{path!r} is refused: name it from the top, without ..")
        resolved = (self._root / path).resolve(strict=True)
        if not resolved.is_relative_to(self._root):
            raise ValueError(f"{path!r} is refused: it leads out of the folder")
        return resolved

    def _find_lines(self, pattern: str) -> Iterator[str]:
        for file in walk_files(self._root):
            answer = self.read_file(str(file.relative_to(self._root)))
            for number, line in enumerate(answer.get("content", "").split("\n"), 1):
                if pattern in line:
                    name = _clean_name(answer["path"])
                    yield f"{name}:{number}: {line.strip()[:MAX_MATCH_CHARS]}"


def walk_files(folder: Path) -> Iterator[Path]:
    """Yields the first 20,000 regular files under a folder, in order of their names.

    Hidden files, caches and symbolic links are left out.
    """
    return itertools.islice(_walk(folder), MAX_WALKED_FILES)


def _walk(folder: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_skipped(name))
        for name in sorted(names):
            file = Path(directory, name)
            if not (_is_skipped(name) or file.is_symlink()) and file.is_file():
                yield file


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name in ("__pycache__", "node_modules")


def _clean_name(name: str) -> str:
    """Replaces what a file name may contain but a text may not."""
    return name.encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True)
class Turn:
    """One message of the user, and the tool calls that the offline agent makes for it.

    Attributes:
        question: What the user asks.
        calls: Tool names with their arguments, in order; an answer follows them.
    """

    question: str
    calls: tuple[tuple[str, dict[str, str]], ...]


@dataclass(frozen=True)
class _Source:
    name: str
    size_bytes: int
    symbols: list[str]

    @property
    def symbol(self) -> str:
        return self.symbols[0] if self.symbols else Path(self.name).stem


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
    for number, (package, sources) in enumerate(
        itertools.cycle(_list_portions(root.resolve()))
    ):
        symbol = max(sources, key=lambda source: source.size_bytes).symbol
        where = "the top folder" if package == "." else f"the folder {package}"
        question = _QUESTIONS[number % len(_QUESTIONS)]
        calls = (
            ("list_files", {"directory": package}),
            ("search", {"pattern": symbol}),
            *(("read_file", {"path": source.name}) for source in sources),
        )
        calls = calls[: steps_left - 1]  # The answer is a step as well.
        turns.append(Turn(question.format(symbol=symbol, package=where), calls))
        steps_left -= len(calls) + 1
        if steps_left < 1:
            break
    return turns


def _list_portions(root: Path) -> list[tuple[str, list[_Source]]]:
    """Cuts folders into what one turn reads: the first of each, then the second …"""
    groups: defaultdict[str, list[_Source]] = defaultdict(list)
    for file in walk_files(root):
        if source := _read_source(root, file):
            groups[Path(source.name).parent.as_posix()].append(source)
    # Bundled scripts are text as well, but define nothing by name.
    ranked = sorted(
        groups.items(),
        key=lambda item: (-sum(bool(s.symbols) for s in item[1]), -len(item[1])),
    )
    portions = [
        (start, package, sources[start : start + FILES_PER_TURN])
        for package, sources in ranked
        for start in range(0, len(sources), FILES_PER_TURN)
    ]
    portions.sort(key=lambda portion: portion[0])
    return [(package, sources) for _, package, sources in portions]


def _read_source(root: Path, file: Path) -> _Source | None:
    """Looks into a file; None for what is empty, binary, unreadable or generated."""
    try:
        with file.open("rb") as stream:
            head = stream.read(_SNIFFED_BYTES)
    except OSError:
        return None
    lines = head.count(b"\n") + 1
    if not head.strip() or b"\0" in head or len(head) / lines > _MAX_LINE_CHARS:
        return None
    name = _clean_name(file.relative_to(root).as_posix())
    symbols = _DEFINITION.findall(head.decode("utf-8", "replace"))
    return _Source(name, file.stat().st_size, symbols)


class OfflineAgent:
    """The script of the offline model: it works through one turn after the other."""

    def __init__(self) -> None:
        self._calls: Iterator[tuple[str, dict[str, str]]] = iter(())
        self._notes: list[str] = []

    def begin(self, turn: Turn) -> None:
        """Starts a turn."""
        self._calls = iter(turn.calls)
        self._notes = []

    def __call__(self, request: LlmRequest) -> Reply:
        """Notes what the last tool returned, and calls the next one or answers."""
        note = ""
        for part in request.contents[-1].parts or ():
            if part.function_response:
                note = describe_result(part.function_response.response or {})
                self._notes.append(note)
        if (step := next(self._calls, None)) is None:
            return "\n".join(["What I found:", *(f"- {note}" for note in self._notes)])
        name, arguments = step
        text = f"Noted: {note}" if note else "I start."
        return [types.Part(text=text), call(name, **arguments)]


def describe_result(answer: Answer) -> str:
    """Says in one line what a tool has returned."""
    if "content" in answer:
        text = str(answer["content"])
        names = ", ".join(_DEFINITION.findall(text)[:6]) or "nothing by name"
        lines = text.count("\n") + 1
        return f"{answer.get('path')} has {lines} lines and defines {names}."
    if "entries" in answer:
        count = len(answer["entries"])
        return f"{answer.get('directory')} has {count} entries."
    if "matches" in answer:
        return f"{len(answer['matches'])} lines match."
    return f"That did not work: {answer.get('error')}."
