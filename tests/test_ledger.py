"""The ledger of the user's messages beside a summary."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk.history.rendering import render_ledger
from contextguard_adk.summarizing.ledger import (
    MAX_EXCERPT_BYTES,
    MAX_FIRST_BYTES,
    MAX_LEDGER_BYTES,
    MIN_EXCERPT_BYTES,
    excerpt,
    extend_ledger,
    telling_excerpt,
)
from contextguard_adk.summary_store import dump_ledger, load_ledger

SCRIPTS = {
    "ascii": "abcdefghij",
    "latin": "äöüßéèàçñø",
    "han": "漢字仮名交文書類記",
    "emoji": "😀🎉🚀🐍🦀",
}


def size(texts: list[str]) -> int:
    """The UTF-8 bytes of all texts."""
    return sum(len(text.encode()) for text in texts)


def numbered(count: int, length: int = 400) -> list[str]:
    """Messages that begin and end with their number."""
    return [f"<{n}>{'x' * length}</{n}>" for n in range(count)]


# --- one excerpt ---


@pytest.mark.parametrize(
    ("text", "max_bytes", "expected"),
    [
        pytest.param("", 10, "", id="empty"),
        pytest.param("abc", 3, "abc", id="fits"),
        pytest.param("abcdefghijkl", 9, "abcd…kl", id="head-and-tail"),
        pytest.param("abcdefgh", 5, "ab…", id="shortest"),
        pytest.param("abcdefgh", 4, "", id="too-short-to-say-anything"),
        pytest.param("abcdefgh", 0, "", id="no-room"),
        pytest.param("abcdefgh", -3, "", id="negative"),
        pytest.param("äääääääää", 12, "äää…ä", id="no-half-characters"),
        pytest.param("a\ud800b", 10, "a?b", id="lone-surrogate"),
    ],
)
def test_excerpt(text: str, max_bytes: int, expected: str) -> None:
    """An excerpt is head and tail, two thirds and one, of whole characters."""
    assert excerpt(text, max_bytes) == expected


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("max_bytes", range(40))
def test_excerpts_in_any_script(script: str, max_bytes: int) -> None:
    """Nothing is cut within a character, and nothing exceeds its bytes."""
    text = SCRIPTS[script] * 20
    short = excerpt(text, max_bytes)
    assert len(short.encode()) <= max_bytes
    head, _, tail = short.partition("…")
    assert text.startswith(head)
    assert text.endswith(tail)


@given(st.text(), st.integers(-5, 300))
def test_excerpt_stays_within_its_bytes(text: str, max_bytes: int) -> None:
    """An excerpt of any text is at most as long as allowed, or whole."""
    short = excerpt(text, max_bytes)
    assert short == text or len(short.encode()) <= max(0, max_bytes)


@pytest.mark.parametrize(
    ("text", "max_bytes", "expected"),
    [
        pytest.param("Fix it.", 40, "Fix it.", id="fits"),
        pytest.param(
            "Please have a look at what went wrong with order A-4711 in the end, if "
            "you have the time for it today, will you",
            60,
            "Please have … went wrong with order A-4711 in the … you",
            id="the-words-around-a-name",
        ),
        pytest.param(
            "This is what it said. "
            + "At 12:01 the job stopped again, and so did all the others. " * 9
            + "Please find out why, and answer in French.",
            120,
            "This is … what it said. At 12:01 the job "
            "… find out why, and answer in French.",
            id="a-wish-behind-what-was-pasted",
        ),
        pytest.param(
            "Look: " + "ERROR a/b.py " * 90 + "Fix it, but never restart billing.",
            60,
            "Look: ERROR a/b.py ERROR a/b.py ERROR …er restart billing.",
            id="names-alone-tell-nothing",
        ),
        pytest.param(
            "Please have a look at what went wrong with the order of yesterday in the "
            "end, will you",
            40,
            "Please have a look at wha…nd, will you",
            id="no-name",
        ),
        pytest.param(
            "Open a/b and c/d and e/f and g/h and i/j and k/l and m/n",
            33,
            "Open a/b and c/d and…/l and m/n",
            id="names-everywhere",
        ),
        pytest.param(f"Look: {'1' * 200} there", 60, None, id="a-name-without-end"),
        pytest.param("漢字9" * 40, 60, None, id="no-blanks"),
        pytest.param("a\ud8001 " * 40, 60, None, id="lone-surrogates"),
    ],
)
def test_excerpts_keep_names(text: str, max_bytes: int, expected: str | None) -> None:
    """A ticket, a path, a number stays with its words; else head and tail do."""
    short = telling_excerpt(text, max_bytes)
    assert len(short.encode()) <= max_bytes
    if expected is not None:
        assert short == expected
    else:
        assert len(short.encode()) > max_bytes / 2


@given(st.text(), st.integers(-5, 300))
def test_telling_excerpt_stays_within_its_bytes(text: str, max_bytes: int) -> None:
    """As any other excerpt, and nothing that no database takes."""
    short = telling_excerpt(text, max_bytes)
    whole = text.encode("utf-8", "replace").decode()
    assert short == whole or len(short.encode()) <= max(0, max_bytes)


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
    assert extend_ledger(known, ["No,\n  wait.\tStop."]) == [
        "Fix the bug.",
        "yes",
        "No, wait. Stop.",
    ]


def test_long_message_keeps_head_and_tail() -> None:
    """One message takes about 240 bytes, its beginning and its end."""
    long = "begin " + "x" * 5_000 + " end"
    _, kept = extend_ledger([], ["The task.", long])
    assert kept.startswith("begin ")
    assert kept.endswith(" end")
    assert MAX_EXCERPT_BYTES - 4 <= len(kept.encode()) <= MAX_EXCERPT_BYTES


def test_the_first_task_keeps_more() -> None:
    """What the session is about stays word for word over many compactions."""
    task = "Move the service. " + "Mind every detail. " * 70
    assert MAX_EXCERPT_BYTES < len(task.strip()) <= MAX_FIRST_BYTES
    ledger = extend_ledger([], [task])
    for turn in range(20):
        ledger = extend_ledger(ledger, [f"And then step {turn}, please."])
    assert ledger[0] == task.strip()


def test_first_and_newest_are_favoured() -> None:
    """Where not all fit, the first two and the newest eight keep the most."""
    lengths = [len(text.encode()) for text in extend_ledger([], numbered(100))]
    favoured = lengths[:2] + lengths[-8:]
    assert len(lengths) == 100
    assert min(favoured) >= 3 * max(lengths[2:-8])
    assert sum(lengths) <= MAX_LEDGER_BYTES


def test_middle_is_left_out_last() -> None:
    """Where short excerpts of all are too many, the oldest but the first go."""
    messages = numbered(1_000)
    kept = extend_ledger([], messages)
    assert len(kept) == MAX_LEDGER_BYTES // MIN_EXCERPT_BYTES
    assert [text[:3] for text in kept[:2]] == ["<0>", "<1>"]
    newest = [f"<{n}>" for n in range(1_000 - len(kept) + 2, 1_000)]
    assert all(text.startswith(n) for text, n in zip(kept[2:], newest, strict=True))


@pytest.mark.parametrize(
    ("max_bytes", "count"),
    [
        pytest.param(-1, 0, id="negative"),
        pytest.param(0, 0, id="nothing"),
        pytest.param(4, 0, id="too-small-for-one"),
        pytest.param(24, 1, id="one"),
        pytest.param(48, 2, id="two"),
        pytest.param(72, 3, id="three"),
        pytest.param(10**9, 20, id="never-more-than-6-KiB"),
    ],
)
def test_small_budgets(max_bytes: int, count: int) -> None:
    """A small budget keeps the newest message first, then the first ones."""
    kept = extend_ledger([], numbered(20), max_bytes)
    assert len(kept) == count
    assert size(kept) <= max(0, min(max_bytes, MAX_LEDGER_BYTES))
    if kept:
        assert kept[-1].startswith("<19>")


@pytest.mark.parametrize("script", SCRIPTS)
def test_growing_ledger_stays_within_its_bytes(script: str) -> None:
    """However long the session, the ledger stays below 6 KiB and knows its start."""
    ledger: list[str] = []
    for number in range(60):
        ledger = extend_ledger(ledger, [f"{number} " + SCRIPTS[script] * 40] * 5)
        assert size(ledger) <= MAX_LEDGER_BYTES
    assert ledger[0].startswith("0 ")
    assert ledger[-1].startswith("59 ")


MESSAGES = st.lists(st.text(max_size=400), max_size=60)


@given(MESSAGES, MESSAGES, st.integers(0, 8_000))
def test_ledger_stays_within_any_budget(
    known: list[str], new: list[str], max_bytes: int
) -> None:
    """Any messages fit any budget, as lines without breaks."""
    ledger = extend_ledger(extend_ledger([], known), new, max_bytes)
    assert size(ledger) <= min(max_bytes, MAX_LEDGER_BYTES)
    assert all(text and len(text.splitlines()) == 1 for text in ledger)
    assert all(len(text.encode()) <= MAX_EXCERPT_BYTES for text in ledger)


@given(st.lists(st.text(min_size=1, max_size=20), max_size=30))
def test_short_ledger_is_stable(messages: list[str]) -> None:
    """A ledger that fits is not changed when nothing is added."""
    ledger = extend_ledger([], messages)
    assert extend_ledger(ledger, []) == ledger


# --- rendering and storage ---


def test_rendered_ledger() -> None:
    """A ledger is a list under a heading, and nothing when it is empty."""
    assert render_ledger([]) == ""
    heading, *lines = render_ledger(["Fix it.", "yes"]).splitlines()
    assert "user's messages" in heading
    assert lines == ["- Fix it.", "- yes"]


@given(st.lists(st.text()))
def test_ledger_is_read_back(ledger: list[str]) -> None:
    """A ledger survives its storage."""
    assert load_ledger(dump_ledger(ledger)) == ledger


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        pytest.param("", [], id="empty"),
        pytest.param("no json", [], id="no-json"),
        pytest.param("{}", [], id="no-list"),
        pytest.param("null", [], id="null"),
        pytest.param("[" * 100_000, [], id="deep"),
        pytest.param('["a", 1, null, ["b"], "c"]', ["a", "c"], id="other-items"),
    ],
)
def test_broken_ledger_is_empty(stored: str, expected: list[str]) -> None:
    """Whatever is no list of texts is left out."""
    assert load_ledger(stored) == expected


def test_stored_ledger_is_one_flat_json_string() -> None:
    """The stored form is readable JSON without escapes for other scripts."""
    texts = list(itertools.chain.from_iterable(SCRIPTS.values()))
    assert json.loads(dump_ledger(texts)) == texts
    assert "漢" in dump_ledger(texts)
