"""The blocks of the documentation."""

from __future__ import annotations

import logging
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "samples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"(?ms)^( *)```(\w*)[^\n]*\n(.*?)^ *```$")


class Block(NamedTuple):
    """A fenced block of a page."""

    place: str
    language: str
    text: str


def read(page: Path) -> str:
    """The text of a page."""
    return page.read_text("utf-8")


BLOCKS = [
    Block(f"{page.relative_to(ROOT)}:{number}", match[2], textwrap.dedent(match[3]))
    for page in PAGES
    for number, match in enumerate(FENCE.finditer(read(page)))
]


def run_python(text: str) -> dict[str, Any]:
    """Runs a block; returns the names that it leaves."""
    names: dict[str, Any] = {"__name__": "documentation"}
    logger = logging.getLogger("contextguard_adk")
    level = logger.level
    exec(compile(text, "documentation", "exec", dont_inherit=True), names)
    logger.setLevel(level)
    return names


def find_python(word: str) -> dict[str, Any]:
    """Runs the first block in which a word stands."""
    texts = (block.text for block in BLOCKS if block.language == "python")
    return run_python(next(text for text in texts if word in text))
