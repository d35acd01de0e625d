"""The benchmarks run, and what must hold holds on a small scale as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.adk.apps.app import EventsCompactionConfig

from benchmarks import _common, compare, waiting
from benchmarks._conversations import write_conversation
from benchmarks._play import Way, play

WINDOW = 8_000
OURS = [way for way in compare.WAYS if way.is_ours]

needs_newer_adk = pytest.mark.skipif(
    EventsCompactionConfig.model_fields["compaction_interval"].is_required(),
    reason="this google-adk neither compacts by a token threshold alone, nor tells "
    "when a run ends",
)


def test_texts_are_real_and_costs_are_in_uncached_prompt_tokens() -> None:
    """A pool of each kind holds more than one result, and no placeholder."""
    for kind in _common.KINDS:
        pool = _common.read_pool(kind)
        assert len(pool) > 10_000
        assert len(set(pool.split("\n"))) > 50 or kind == "base64"
    # 600 that no cache served, 400 that it served, and an answer of 10.
    assert _common.price(1_000, 400, 10) == 600 + 40 + 80


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
@needs_newer_adk
def test_the_comparison_says_what_it_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every way has a row; tokens are compared where both finish, as ADK's own
    compaction does."""
    played = compare.measure(["tables of numbers"], 4_000, length=0.4)
    figures = compare.build_figures(played)
    _common.write_json(tmp_path / "figures.json", figures)
    assert json.loads((tmp_path / "figures.json").read_text("utf-8")) == figures
    compare.print_figures(figures, "notes")
    printed = capsys.readouterr().out
    assert all(way.name in printed for way in compare.WAYS)
    assert figures["ways"]["no guard"]["lost_turns"] > 0
    assert figures["ways"]["no guard"]["tool_facts"] == 0
    [baseline] = played[compare.BASELINE]
    assert baseline.summaries
    assert baseline.is_finished
    assert (baseline.rejections, baseline.broken_pairs) == (0, 0)
    against = figures["against"][compare.BASELINE]
    assert against["no guard"] is None
    assert against[compare.BASELINE]["cost"] == 1.0
    one = compare.build_figures({"Threshold": played["Threshold"]})
    assert not one["against"]
    compare.print_figures(one, "notes")


@pytest.mark.slow
def test_agents_wait_less_with_summaries_ahead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing else is worse."""
    timed = waiting.measure(["reading source files"], 1, 0.5)
    figures = waiting.build_figures(timed)
    without, ahead = figures[waiting.WITHOUT], figures["ahead=True"]
    summaries_seconds = waiting.SUMMARY_SECONDS * without["summaries"]
    assert without["waited_seconds"] == pytest.approx(summaries_seconds) != 0
    assert ahead["waited_seconds_ratio"] <= 0.8
    assert ahead["ahead"] == ahead["compactions"] >= without["compactions"]
    for row in figures.values():
        # The answers take as long in each row.
        answers_seconds = row["seconds"] - row["waited_seconds"]
        assert answers_seconds == pytest.approx(without["seconds"] - summaries_seconds)
        for name in ("user_facts", "tool_facts"):
            assert row[name] >= without[name] > 0
        for name in ("without_request", "rejections", "broken_pairs", "lost_turns"):
            assert row[name] == 0
    waiting.print_figures(figures, 1)
    printed = capsys.readouterr().out
    assert all(way in printed for way in waiting.WAYS)
