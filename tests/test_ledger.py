"""The ledger of the user's messages beside a summary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk._summarizing.ledger import (
    MAX_EXCERPT_BYTES,
    MAX_FIRST_BYTES,
    MAX_LEDGER_BYTES,
    excerpt,
    extend_ledger,
    telling_excerpt,
)


@given(st.text(), st.integers(-5, 300))
def test_excerpts_stay_within_their_bytes(text: str, max_bytes: int) -> None:
    """An excerpt of any text is at most as long as allowed, or whole, and storable."""
    whole = text.encode("utf-8", "replace").decode()
    for short in (excerpt(text, max_bytes), telling_excerpt(text, max_bytes)):
        assert short == whole or len(short.encode()) <= max(0, max_bytes)


TELLING = {
    "the-words-around-a-name": (
        "Please have a look at what went wrong with order A-4711 in the end, if "
        "you have the time for it today, will you",
        60,
        "Please have … went wrong with order A-4711 in the … you",
    ),
    "a-wish-behind-what-was-pasted": (
        "This is what it said. "
        + "At 12:01 the job stopped again, and so did all the others. " * 9
        + "Please find out why, and answer in French.",
        120,
        "This is … what it said. At 12:01 the job "
        "… find out why, and answer in French.",
    ),
    "a-name-without-end": (f"Look: {'1' * 200} there", 60, None),
}


@pytest.mark.parametrize(
    ("text", "max_bytes", "expected"), TELLING.values(), ids=TELLING
)
def test_excerpts_keep_names(text: str, max_bytes: int, expected: str | None) -> None:
    """A ticket, a path, a number stays with its words; else head and tail do."""
    short = telling_excerpt(text, max_bytes)
    assert max_bytes / 2 < len(short.encode()) <= max_bytes or short == expected
    if expected is not None:
        assert short == expected


def test_identifiers_survive_many_compactions() -> None:
    """What fifty long messages named can be read after all of them."""
    names = [f"order-{number}{number}" for number in range(50)]
    ledger: list[str] = []
    for name in names:
        wish = f"{'please go on with this and then '}{name} {'as we agreed ' * 12}"
        ledger = extend_ledger(ledger, [wish])
    text = "\n".join(ledger)
    assert [name for name in names if name not in text] == []


# --- the ledger ---


def test_short_messages_are_kept_in_order() -> None:
    """What fits is kept word for word, in lines of one blank between words."""
    known = extend_ledger([], ["Fix the bug.", "yes", "", " \n "])
    ledger = extend_ledger(known, ["No,\n  wait.\tStop."])
    assert ledger == ["Fix the bug.", "yes", "No, wait. Stop."]


def test_the_first_task_keeps_more() -> None:
    """It stays word for word over many compactions; other long messages are cut."""
    task = "Move the service. " + "Mind every detail. " * 70
    assert MAX_EXCERPT_BYTES < len(task.strip()) <= MAX_FIRST_BYTES
    ledger = extend_ledger([], [task, "begin " + "x" * 5_000 + " end"])
    assert MAX_EXCERPT_BYTES - 4 <= len(ledger[1].encode()) <= MAX_EXCERPT_BYTES
    for turn in range(20):
        ledger = extend_ledger(ledger, [f"And then step {turn}, please."])
    assert ledger[0] == task.strip()


MESSAGES = st.lists(st.text(max_size=400), max_size=60)


@given(MESSAGES, MESSAGES, st.integers(0, 8_000))
def test_ledger_stays_within_any_budget(
    known: list[str], new: list[str], max_bytes: int
) -> None:
    """Any messages fit any budget, as lines without breaks."""
    ledger = extend_ledger(extend_ledger([], known), new, max_bytes)
    assert len("".join(ledger).encode()) <= min(max_bytes, MAX_LEDGER_BYTES)
    assert all(text and len(text.splitlines()) == 1 for text in ledger)
    assert all(len(text.encode()) <= MAX_FIRST_BYTES for text in ledger[:1])
    assert all(len(text.encode()) <= MAX_EXCERPT_BYTES for text in ledger[1:])
