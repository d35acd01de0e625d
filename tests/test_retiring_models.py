"""What CI says of models that are about to be switched off."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from tests.retiring_models import FILES, ROOT, find_retiring, list_words, load_table

TODAY = datetime.date(2030, 6, 1)


def until(day: str) -> dict[str, Any]:
    """A model that is switched off on a day."""
    return {"mode": "chat", "deprecation_date": day}


TABLE = {
    "m-gone": until("2029-01-01"),
    "m-soon": until("2030-08-30"),
    "cloud/m-soon": until("2030-07-01"),
    "m-later": until("2030-08-31"),
    "m-stays": {"mode": "chat"},
    "sample_spec": {"deprecation_date": None},
    "odd": 7,
}


def test_models_are_listed_ninety_days_before(tmp_path: Path) -> None:
    """With the day and the files; longer names are other models."""
    (tmp_path / "docs" / "api").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "README.md").write_text('Set `model="m-soon"`, m-later or m-stays.')
    (tmp_path / "docs" / "api" / "page.md").write_text("| `cloud/m-soon` | (m-gone) |")
    (tmp_path / "tests" / "test_x.py").write_text('NAMES = "m-gone-2 my-m-gone"')
    (tmp_path / "CHANGELOG.md").write_text("m-gone")

    assert [str(each) for each in find_retiring(tmp_path, TABLE, TODAY)] == [
        "2029-01-01  m-gone  in docs/api/page.md",
        "2030-07-01  cloud/m-soon  in docs/api/page.md",
        "2030-08-30  m-soon  in README.md, docs/api/page.md",
    ]
    assert not find_retiring(tmp_path, TABLE, datetime.date(2028, 1, 1))


def test_the_names_of_this_project_are_seen() -> None:
    """Each kind of file is there, and names in them stand in litellm's table."""
    for pattern in FILES:
        assert any(ROOT.glob(pattern)), pattern
    words = set(list_words((ROOT / "README.md").read_text("utf-8")))
    assert {"gemini-flash-latest", "gpt-5.4-mini"} <= words & load_table().keys()
