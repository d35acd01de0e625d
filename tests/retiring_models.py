"""Lists the models in README, docs, samples and tests that will be switched off soon.

`python -m tests.retiring_models` prints them, and never fails: a test that fails on a
certain day would break builds in which nothing has changed.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
NOTICE = datetime.timedelta(days=90)
"""So long before the day is a model listed."""

FILES = (
    "README.md",
    "docs/**/*.md",
    "samples/**/*.md",
    "samples/**/*.py",
    "samples/**/*.toml",
    "benchmarks/*.py",
    "tests/**/*.py",
)
_NAME = re.compile(r"\w[\w./:@-]*\w")

Table = Mapping[str, Any]


class Retiring(NamedTuple):
    """A model, the day on which it is switched off, and the files that name it."""

    day: str
    model: str
    files: list[str]

    def __str__(self) -> str:
        return f"{self.day}  {self.model}  in {', '.join(self.files)}"


def load_table() -> Table:
    """Reads the table of litellm's package."""
    spec = importlib.util.find_spec("litellm")
    assert spec
    assert spec.origin
    name = "model_prices_and_context_window_backup.json"
    table: Table = json.loads(Path(spec.origin).with_name(name).read_bytes())
    return table


def list_words(text: str) -> Iterator[str]:
    """The words of a text that can be names, also without what is before a slash."""
    for word in _NAME.findall(text):
        yield word
        yield word.rpartition("/")[2]


def find_retiring(root: Path, table: Table, today: datetime.date) -> list[Retiring]:
    """The models that files below `root` name, the first to be switched off first."""
    last_day = (today + NOTICE).isoformat()
    days = {
        model: str(fields["deprecation_date"])
        for model, fields in table.items()
        if isinstance(fields, dict) and fields.get("deprecation_date")
    }
    soon = {model for model, day in days.items() if day <= last_day}

    files: dict[str, list[str]] = {}
    for path in sorted(path for pattern in FILES for path in root.glob(pattern)):
        words = set(list_words(path.read_text("utf-8")))
        for model in sorted(words & soon):
            files.setdefault(model, []).append(path.relative_to(root).as_posix())

    return sorted(Retiring(days[model], model, files[model]) for model in files)


def main() -> None:
    """Prints a line for each."""
    for retiring in find_retiring(ROOT, load_table(), datetime.date.today()):
        print(retiring)


if __name__ == "__main__":
    main()
