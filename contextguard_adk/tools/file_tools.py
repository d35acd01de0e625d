"""Read-only file tools for the demo's agent, confined to one folder.

What an agent asks for is untrusted. A path is taken relative to the folder; one that
leads out of it, by `..`, as an absolute path or through a symbolic link, is refused.
Every failure is an answer `{"error": …}`, so that the model can try something else.
"""

from __future__ import annotations

import codecs
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAX_READ_BYTES = 200_000
"""What `read_file` returns of one file at most."""

MAX_SEARCHED_BYTES = 2_000_000
"""Larger files are not searched."""

MAX_ENTRIES = 300
MAX_MATCHES = 100
MAX_MATCH_CHARS = 200
MAX_WALKED_FILES = 20_000

_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
_SNIFFED_BYTES = 8_192

Answer = dict[str, Any]


class _RefusedError(ValueError):
    """A request that the tools do not serve; its text is for the model."""


def _answer_errors(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Turns what goes wrong in a tool into an answer."""

    @functools.wraps(method)
    def tool(self: FileTools, *args: Any, **kwargs: Any) -> Answer:
        try:
            return method(self, *args, **kwargs)
        except _RefusedError as error:
            return {"error": str(error)}
        except OSError as error:
            # The error's own text would tell where the folder is.
            return {"error": error.strerror or type(error).__name__}

    return tool


class FileTools:
    """Three tools that list, read and search the files of one folder.

    Args:
        root: The folder; nothing outside it is read.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    @_answer_errors
    def list_files(self, directory: str = ".") -> dict[str, Any]:
        """Lists a folder: files with their size, subfolders with a slash.

        Args:
            directory: The folder's path; "." is the top.
        """
        folder = self._resolve(directory)
        if not folder.is_dir():
            raise _RefusedError(f"{directory!r} is not a folder")
        entries = list(self._describe(folder))
        answer: Answer = {"directory": directory, "entries": entries[:MAX_ENTRIES]}
        if len(entries) > MAX_ENTRIES:
            answer["note"] = f"{MAX_ENTRIES} of {len(entries)} entries are shown."
        return answer

    @_answer_errors
    def read_file(self, path: str) -> dict[str, Any]:
        """Returns the text of a file.

        Args:
            path: The file's path, as `list_files` and `search` show it.
        """
        file = self._resolve(path)
        if not file.is_file():
            raise _RefusedError(f"{path!r} is not a file")
        with file.open("rb") as stream:
            data = stream.read(MAX_READ_BYTES + 1)
            file_bytes = os.fstat(stream.fileno()).st_size
        if is_binary(data):
            raise _RefusedError(f"{path!r} is a binary file of {file_bytes:,} bytes")
        answer: Answer = {"path": path, "content": decode_head(data, MAX_READ_BYTES)}
        if len(data) > MAX_READ_BYTES:
            answer["note"] = (
                f"The file has {file_bytes:,} bytes; the first {MAX_READ_BYTES:,} are "
                "shown."
            )
        return answer

    @_answer_errors
    def search(self, pattern: str, directory: str = ".") -> dict[str, Any]:
        """Finds the lines of all files that contain a text.

        Args:
            pattern: The text itself, no regular expression; case matters.
            directory: Where to search; "." is everywhere.
        """
        folder = self._resolve(directory)
        if not isinstance(pattern, str) or not pattern:
            raise _RefusedError("the pattern must be a text of at least one character")
        if not folder.is_dir():
            raise _RefusedError(f"{directory!r} is not a folder")
        matches: list[str] = []
        for file in walk_files(folder):
            matches += self._find_lines(file, pattern)
            if len(matches) > MAX_MATCHES:
                note = f"Only the first {MAX_MATCHES} matches are shown."
                return {"matches": matches[:MAX_MATCHES], "note": note}
        return {"matches": matches}

    def _resolve(self, path: str) -> Path:
        """Returns the real path of what the agent named, inside the folder."""
        if not isinstance(path, str) or "\0" in path:
            raise _RefusedError("a path must be a text")
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise _RefusedError(
                f"{path!r} is refused: name it from the top, without .."
            )
        try:
            resolved = (self._root / path).resolve(strict=True)
        except FileNotFoundError:
            raise _RefusedError(f"{path!r} does not exist") from None
        except RuntimeError:  # How Python before 3.13 reports a loop of links.
            raise _RefusedError(f"{path!r} is a loop of links") from None
        if not resolved.is_relative_to(self._root):
            raise _RefusedError(f"{path!r} is refused: it leads out of the folder")
        return resolved

    def _describe(self, folder: Path) -> Iterator[str]:
        with os.scandir(folder) as entries:
            children = sorted(entries, key=lambda entry: entry.name)
        for entry in children:
            if _is_skipped(entry.name):
                continue
            name = printable(entry.name)
            if entry.is_symlink():
                yield f"{name} (link)"
            elif entry.is_dir():
                yield f"{name}/"
            else:
                yield f"{name} ({entry.stat().st_size:,} bytes)"

    def _find_lines(self, file: Path, pattern: str) -> Iterator[str]:
        try:
            if file.stat().st_size > MAX_SEARCHED_BYTES:
                return
            data = file.read_bytes()
        except OSError:
            return
        needle = pattern.encode("utf-8", "surrogatepass")
        if needle not in data or is_binary(data):
            return
        name = name_in(self._root, file)
        for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
            if pattern in line:
                yield f"{name}:{number}: {line.strip()[:MAX_MATCH_CHARS]}"


def walk_files(folder: Path) -> Iterator[Path]:
    """Yields the regular files under a folder, in order of their names.

    Hidden files, caches and symbolic links are left out; after 20,000 files it stops.
    """
    count = 0
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_skipped(name))
        for name in sorted(files):
            file = Path(directory, name)
            if _is_skipped(name) or file.is_symlink() or not file.is_file():
                continue
            count += 1
            if count > MAX_WALKED_FILES:
                return
            yield file


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED_FOLDERS


def is_binary(data: bytes) -> bool:
    """Tells whether the head of a file is no text."""
    return b"\0" in data[:_SNIFFED_BYTES]


def decode_head(data: bytes, max_bytes: int) -> str:
    """Decodes the first `max_bytes` of a file, without half a character at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data[:max_bytes], final=len(data) <= max_bytes)


def name_in(root: Path, path: Path) -> str:
    """Returns the name by which the tools know a path inside `root`."""
    return printable(path.relative_to(root).as_posix())


def printable(name: str) -> str:
    """Replaces what a file name may contain but a text may not."""
    return name.encode("utf-8", "replace").decode("utf-8")
