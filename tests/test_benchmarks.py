"""The benchmarks run, and what must hold holds on a small scale as well."""

from __future__ import annotations

import json
from itertools import repeat
from pathlib import Path

import pytest
from google.adk.apps.app import EventsCompactionConfig

from benchmarks import _common, _long_sessions, accuracy, compare, overhead, waiting
from benchmarks._conversations import SHAPES, total_tokens, write_conversation
from benchmarks._play import NotedSummaries, Way, play
from benchmarks._turns import make_pair
from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import SimulatedLlm
from tests.chats import ProviderBusyError

WINDOW = 8_000
OURS = [way for way in compare.WAYS if way.is_ours]
BASELINE = next(way for way in compare.WAYS if way.name == compare.BASELINE)

needs_newer_adk = pytest.mark.skipif(
    EventsCompactionConfig.model_fields["compaction_interval"].is_required(),
    reason="this google-adk neither compacts by a token threshold alone, nor tells "
    "when a run ends",
)


@pytest.mark.parametrize("kind", _common.KINDS)
def test_there_is_real_text_of_every_kind(kind: str) -> None:
    """A pool holds more than one result, and no placeholder."""
    pool = _common.read_pool(kind)
    assert len(pool) > 10_000
    assert len(set(pool.split("\n"))) > 50 or kind == "base64"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_conversations_are_long_and_always_the_same(name: str) -> None:
    """They exceed the window, their facts stand in them, once."""
    talk = write_conversation(name, WINDOW)
    assert talk == write_conversation(name, WINDOW)
    assert total_tokens(talk) > 2 * WINDOW
    assert len({*talk.user_facts, *talk.tool_facts}) >= 5
    said = "\n".join(turn.message for turn in talk.turns)
    results = [use.result for turn in talk.turns for s in turn.steps for use in s]
    found = json.dumps(results)
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


async def count_facts(name: str, outages: int) -> int:
    """Of tools, where the summarizer's first calls fail."""
    talk = write_conversation(name, WINDOW, 0.5)
    busy = repeat(ProviderBusyError("Overloaded."), outages)
    write = NotedSummaries(dict(talk.notes))
    summarizer = SimulatedLlm(
        context_window=WINDOW,
        summary_replies=lambda request: next(busy, None) or write(request),
    )
    strategy = Threshold(
        context_window=talk.configured_tokens,
        summarizer=summarizer,
        summarizer_context_window=WINDOW,
    )
    guarded = Way(name, plugins=lambda _: [ContextGuardPlugin(default=strategy)])
    played = await play(talk, guarded)
    assert (played.lost_turns, played.broken_pairs) == (0, 0)
    assert summarizer.summaries > outages
    return played.tool_facts


@pytest.mark.slow
async def test_a_summarizer_that_was_down_costs_no_facts() -> None:
    """Three times in a row, in each conversation; as it compacts at other places then,
    a few facts come and go."""
    as_usual = [await count_facts(name, 0) for name in SHAPES]
    after_outages = [await count_facts(name, 3) for name in SHAPES]
    assert sum(after_outages) >= 0.98 * sum(as_usual) > 100


@pytest.mark.slow
@needs_newer_adk
def test_the_comparison_says_what_it_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every way has a row; tokens are compared where both finish."""
    played = compare.measure(["tables of numbers"], 4_000, length=0.4)
    figures = compare.build_figures(played)
    _common.write_json(tmp_path / "figures.json", figures)
    assert json.loads((tmp_path / "figures.json").read_text("utf-8")) == figures
    compare.print_figures(figures, "notes")
    printed = capsys.readouterr().out
    assert all(way.name in printed for way in compare.WAYS)
    assert figures["ways"]["no guard"]["lost_turns"] > 0
    assert figures["ways"]["no guard"]["tool_facts"] == 0
    against = figures["against"][compare.BASELINE]
    assert against["no guard"] is None
    assert against[compare.BASELINE]["cost"] == 1.0
    one = compare.build_figures({"Threshold": played["Threshold"]})
    assert not one["against"]
    compare.print_figures(one, "notes")


def test_a_cost_is_in_uncached_prompt_tokens() -> None:
    """600 that no cache served, 400 that it served, and an answer of 10."""
    assert _common.price(1_000, 400, 10) == 600 + 40 + 80


@pytest.mark.slow
@needs_newer_adk
async def test_the_baseline_compacts_and_finishes() -> None:
    """ADK's own compaction is not set up to fail."""
    played = await play(write_conversation("tables of numbers", WINDOW, 0.5), BASELINE)
    assert played.summaries
    assert played.is_finished
    assert (played.rejections, played.broken_pairs) == (0, 0)


@pytest.mark.slow
@needs_newer_adk
@pytest.mark.parametrize("kind", overhead.KINDS)
async def test_the_memory_of_a_turn_compares(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn has a peak of the size of its contents, and leaves only measures."""
    # As in a run of the benchmark, where ADK writes no request into a trace.
    monkeypatch.setenv("ADK_TELEMETRY_SCHEMA_VERSION_OPT_IN", "1")
    monkeypatch.setenv("ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS", "false")
    bare, guarded = await make_pair(kind, 200)
    has_summary = any("summary" in key for key in guarded.sessions.stored.state)
    assert has_summary is kind.endswith("summary")
    memory = await overhead.measure_memory((bare, guarded))
    assert memory["adk_peak_kb"] > 200
    # Below the threshold the guard adds nearly nothing, and ADK alone varies by KBs.
    assert 0.95 < memory["peak_ratio"] < 1.5
    # Up to 490 bytes for each of the 200 contents were measured.
    assert abs(memory["kept_kb"]) < 140
    assert abs(memory["adk_kept_kb"]) < 20


@pytest.mark.slow
async def test_estimates_follow_the_counts() -> None:
    """From the second call on they are close, and none is too low."""
    kinds = (accuracy.MIXED, "cjk")
    sessions = [await accuracy.play(kind, "cl100k_base", 12) for kind in kinds]
    later = accuracy.rate(accuracy._pairs(sessions, "guard", is_first=False))
    assert later["median"] <= accuracy.GOALS["median"]
    assert later["low"] <= accuracy.GOALS["low"]


@pytest.mark.slow
async def test_the_automatic_trigger_makes_a_large_window_cheap(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A chat of 600 calls costs at most 0.3 of the default, with a prompt cache."""
    cell = _long_sessions.Cell("chat", has_cache=True)
    ways = _long_sessions.WAYS
    spent = {name: await _long_sessions.play(cell, ways[name]) for name in ways}
    assert all(one.cost_tokens for one in spent.values())
    figures = _long_sessions.build_figures({cell: spent})
    assert figures[cell.name]["of the default"] <= 0.3
    _long_sessions.print_figures(figures)
    assert cell.name in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "most_ratio"), [(1, 0.8), (4, 0.1)])
def test_agents_wait_less_with_summaries_ahead(
    scale: int, most_ratio: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a large window hardly at all; nothing else is worse."""
    timed = waiting.measure(["reading source files"], scale, 0.5)
    figures = waiting.build_figures(timed)
    without, ahead = figures[waiting.WITHOUT], figures["ahead=True"]
    summaries_seconds = waiting.SUMMARY_SECONDS * without["summaries"]
    assert without["waited_seconds"] == pytest.approx(summaries_seconds) != 0
    assert ahead["waited_seconds_ratio"] <= most_ratio
    assert ahead["ahead"] == ahead["compactions"] >= without["compactions"]
    for row in figures.values():
        # The answers take as long in each row.
        answers_seconds = row["seconds"] - row["waited_seconds"]
        assert answers_seconds == pytest.approx(without["seconds"] - summaries_seconds)
        for name in ("user_facts", "tool_facts"):
            assert row[name] >= without[name] > 0
        for name in ("without_request", "rejections", "broken_pairs", "lost_turns"):
            assert row[name] == 0
    waiting.print_figures(figures, scale)
    printed = capsys.readouterr().out
    assert all(way in printed for way in waiting.WAYS)
