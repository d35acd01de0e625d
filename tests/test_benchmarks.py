"""The benchmarks run, and what must hold holds on a small scale as well."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from google.adk.apps.app import EventsCompactionConfig

from benchmarks import _common, _recordings_picture, compare, recordings
from benchmarks._conversations import write_conversation
from benchmarks._play import Way, play
from benchmarks._recorded import read_recording

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


@pytest.mark.slow
async def test_recorded_sessions_go_on_where_they_would_end() -> None:
    """Without a limit all that calls needed is there; ours loses no turn in a window
    in which a session without a guard comes to its end."""
    customers = recordings.CUSTOMERS[-2:]
    whole = read_recording("airline", customers, 1_000_000)
    no_guard = recordings.WAYS["no guard"]
    ours = recordings.WAYS["Threshold"]
    free = await recordings.play_recording(whole, no_guard)
    assert free["needed"] > 30
    assert (free["missing"], free["lost_turns"], free["summaries"]) == (0, 0, 0)

    talk = read_recording("airline", customers, 8_000)
    ended = await recordings.play_recording(talk, no_guard)
    assert ended["lost_turns"] == ended["rejections"] > 0

    kept = await recordings.play_recording(talk, ours)
    assert (kept["lost_turns"], kept["rejections"]) == (0, 0)
    assert kept["summaries"]
    assert free["needed"] == kept["needed"] > ended["missing"] > kept["missing"]


@needs_newer_adk
@pytest.mark.slow
async def test_a_recorded_turn_is_not_lost_where_adk_loses_it() -> None:
    """A long turn fills the window by itself."""
    talk = read_recording("code", recordings.CODE[3:4], 8_000)
    theirs, ours = [
        await recordings.play_recording(talk, recordings.WAYS[name])
        for name in ("ADK compaction, keeps 6", "Threshold")
    ]
    assert (theirs["lost_turns"], ours["lost_turns"]) == (1, 0)
    assert theirs["missing"] > ours["missing"]


def test_recorded_sessions_are_shown_as_tables_and_as_a_picture(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the rows that are drawn, each has a bar with its figure."""
    counted = dict.fromkeys(recordings.COUNTS, 1_000)
    values = {"needed": 8, "missing": 2, "needed_far": 0, "missing_far": 0}
    row = recordings.add_up([counted | values, counted | values])
    ways = dict.fromkeys(recordings.WAYS, row)
    figures = {"some": {"title": "2 sessions, window 8", "turns": 4, "ways": ways}}
    recordings.print_figures(figures, is_markdown=True)
    line = "| Threshold * | 2,000 | 2,000 | 2,000 | 2 | 0.750 | - |"
    assert line in capsys.readouterr().out.splitlines()

    drawn = _recordings_picture.draw(figures)
    assert drawn.count(">0.75</text>") == len(_recordings_picture.COLORS)
    ElementTree.fromstring(drawn)
