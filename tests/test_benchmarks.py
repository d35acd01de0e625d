"""The benchmarks run, and what must hold holds on a small scale as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.adk.apps.app import EventsCompactionConfig

from benchmarks import _common, accuracy, compare, overhead
from benchmarks._conversations import SHAPES, total_tokens, write_conversation
from benchmarks._play import Way, play
from benchmarks._turns import make_pair

WINDOW = 8_000
OURS = [way for way in compare.WAYS if way.is_ours]
BASELINE = next(way for way in compare.WAYS if way.name == compare.BASELINE)


token_threshold_alone = pytest.mark.skipif(
    EventsCompactionConfig.model_fields["compaction_interval"].is_required(),
    reason="this google-adk cannot compact by a token threshold alone",
)


def as_json(figures: dict[str, Any], folder: Path) -> Any:
    """What the file says, once it is written and read again."""
    path = folder / "figures.json"
    _common.write_json(path, figures)
    return json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("kind", _common.KINDS)
def test_there_is_real_text_of_every_kind(kind: str) -> None:
    """A pool holds more than one result, and no placeholder."""
    pool = _common.read_pool(kind)
    assert len(pool) > 10_000
    assert len(set(pool.split("\n"))) > 50 or kind == "base64"


@pytest.mark.parametrize(
    "name",
    [
        name if name == "large results" else pytest.param(name, marks=pytest.mark.slow)
        for name in SHAPES
    ],
)
def test_conversations_are_long_and_always_the_same(name: str) -> None:
    """They exceed the window, their facts stand in them, once."""
    talk = write_conversation(name, WINDOW)
    assert talk == write_conversation(name, WINDOW)
    assert total_tokens(talk) > 2 * WINDOW
    facts = [*talk.user_facts, *talk.tool_facts]
    assert len(facts) == len(set(facts)) >= 5
    said = "\n".join(turn.message for turn in talk.turns)
    found = json.dumps(
        [use.result for turn in talk.turns for s in turn.steps for use in s]
    )
    assert all(fact in said for fact in talk.user_facts)
    assert all(fact in found for fact in talk.tool_facts)


@pytest.mark.slow
@pytest.mark.parametrize("way", OURS, ids=lambda way: way.name)
async def test_ours_loses_no_turn(way: Way) -> None:
    """No rejection but one where the window is wrong, no broken pair, no lost words."""
    talk = write_conversation("configured window too large", WINDOW, 0.3)
    played = await play(talk, way)
    assert played.rejections <= 1
    assert (played.broken_pairs, played.lost_turns, played.without_request) == (0, 0, 0)
    assert played.summaries or way.name.startswith("Pipeline")
    assert 0 < played.cached_tokens < played.prompt_tokens < played.billed_tokens


@pytest.mark.slow
@token_threshold_alone
async def test_the_comparison_says_what_it_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every way has a row; tokens are compared where both finish."""
    played = await compare.measure(["large results"], 4_000, length=0.4)
    figures = compare.build_figures(played)
    assert as_json(figures, tmp_path) == figures
    compare.print_figures(figures, "notes")
    printed = capsys.readouterr().out
    for way in compare.WAYS:
        assert way.name in printed
    assert figures["ways"]["no guard"]["lost_turns"] > 0
    assert figures["against"][compare.BASELINE]["no guard"] is None
    assert figures["ways"]["no guard"]["tool_facts"] == 0


@pytest.mark.slow
@token_threshold_alone
async def test_the_baseline_compacts_and_finishes() -> None:
    """ADK's own compaction is not set up to fail."""
    played = await play(write_conversation("tables of numbers", WINDOW, 0.5), BASELINE)
    assert played.summaries
    assert played.is_finished
    assert (played.rejections, played.broken_pairs) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", overhead.KINDS)
async def test_the_overhead_is_measured(kind: str) -> None:
    """Both sessions stay as long as they are; the guard keeps nothing."""
    bare, guarded = await make_pair(kind, 20)
    for chat in (bare, guarded):
        await chat.turn()
        assert chat.sessions.stored.events == chat.base
        assert len(chat.base) == 20
        whole_ms, loading_ms = await chat.timed_turn()
        assert 0 < loading_ms < whole_ms
    has_summary = any("summary" in key for key in guarded.sessions.stored.state)
    assert has_summary is kind.endswith("summary")
    assert not any("context_guard" in key for key in bare.sessions.stored.state)


@pytest.mark.slow
async def test_the_overhead_has_a_row_for_each_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are written and printed."""
    figures = await overhead.measure([10], 1, ["text"])
    assert [row["contents"] for row in figures["calls"]] == [10]
    assert as_json(figures, tmp_path) == figures
    overhead.print_figures({**figures, "import_adk_ms": 900.0, "import_ms": 40.0})
    assert "adds 40 ms to the 900 ms of ADK" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(
    EventsCompactionConfig.model_fields["compaction_interval"].is_required(),
    reason="this google-adk tells nobody when a run ends, and is measured nowhere",
)
@pytest.mark.parametrize("kind", overhead.KINDS)
async def test_the_memory_of_a_turn_compares(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn has a peak of the size of its contents, and leaves only measures."""
    # As in a run of the benchmark, where ADK writes no request into a trace.
    monkeypatch.setenv("ADK_TELEMETRY_SCHEMA_VERSION_OPT_IN", "1")
    monkeypatch.setenv("ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS", "false")
    contents = 200
    memory = await overhead.measure_memory(await make_pair(kind, contents))
    assert memory["adk_peak_kb"] > 200
    # Below the threshold the guard adds nearly nothing, and ADK alone varies by KBs.
    assert 0.95 < memory["peak_ratio"] < 1.5
    # Up to 490 bytes for each content were measured.
    assert abs(memory["kept_kb"]) * 1_024 < 700 * contents
    assert abs(memory["adk_kept_kb"]) < 20


def test_tables_are_never_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every name and number is there whole, however narrow the terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    header = ("history", *(f"the column number {number}" for number in range(9)))
    _common.print_table("Title", header, [["a name", *range(10**8, 10**8 + 9)]])
    printed = capsys.readouterr().out
    assert all(name in printed for name in header)
    assert all(f"100,000,00{number}" in printed for number in range(9))


@pytest.mark.slow
async def test_estimates_follow_the_counts() -> None:
    """From the second call on they are close, and none is too low."""
    kinds = (accuracy.MIXED, "cjk")
    sessions = [await accuracy.play(kind, "cl100k_base", 12) for kind in kinds]
    for session in sessions:
        assert len(session.real) >= 12
        assert {len(found) for found in session.estimates.values()} == {
            len(session.real)
        }
    later = accuracy.rate(accuracy._pairs(sessions, "guard", is_first=False))
    assert later["median"] <= accuracy.GOALS["median"]
    assert later["low"] <= accuracy.GOALS["low"]


def test_errors_are_rated_by_hand() -> None:
    """Median, 95th percentile, and the share that is more than 10 % too low."""
    pairs = [(100, 100)] * 18 + [(85, 100), (130, 100)]
    rated = accuracy.rate(pairs)
    assert rated["median"] == 0
    assert rated["p95"] == pytest.approx(0.15)
    assert rated["low"] == 1 / 20
