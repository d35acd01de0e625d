"""The benchmarks run, and what must hold holds on a small scale as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.adk.apps.app import EventsCompactionConfig

from benchmarks import _common, compare
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
    """Every way has a row."""
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
