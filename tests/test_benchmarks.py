"""The benchmarks run, and what must hold holds on a small scale as well."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from google.adk.apps.app import EventsCompactionConfig
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from benchmarks import (
    _common,
    _recordings_picture,
    compare,
    first_estimates,
    recordings,
)
from benchmarks._conversations import total_tokens, write_conversation
from benchmarks._play import Way, play
from benchmarks._recorded import FOLDER, RecordedScript, read_file, read_recording
from benchmarks._small_facts import SMALL_FACTS, write_small_facts

WINDOW = 8_000
RECORDINGS = sorted(path for path in FOLDER.iterdir() if path.name != "README.md")
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

    compare.print_figures("tables", figures)
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


@pytest.mark.parametrize("name", SMALL_FACTS)
def test_small_facts_are_the_same_on_every_run_and_told_apart(name: str) -> None:
    """Each fact is said once, by the user or by a tool, and names nothing else."""
    talk = write_small_facts(name, WINDOW)
    assert talk == write_small_facts(name, WINDOW)
    assert talk.turns != write_small_facts(name, WINDOW, seed="other").turns

    messages = "\n".join(turn.message for turn in talk.turns)
    uses = [use for turn in talk.turns for step in turn.steps for use in step]
    results = "\n".join(json.dumps(use.result) for use in uses)
    answers = "\n".join(turn.answer for turn in talk.turns)
    arguments = "\n".join(json.dumps(use.args) for use in uses)
    for facts, source in (talk.user_facts, messages), (talk.tool_facts, results):
        assert len(facts) >= 12
        assert [source.count(fact) for fact in facts] == [1] * len(facts)
    elsewhere = messages + answers + arguments
    assert not any(fact in elsewhere for fact in talk.tool_facts)
    assert total_tokens(talk) > 2 * talk.window_tokens


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_every_file_of_recordings_names_its_license_and_sources(path: Path) -> None:
    """What is published with the project may be."""
    assert read_file(path)["sessions"]


@pytest.mark.parametrize(
    ("origin", "reason"),
    [
        ({"source": "someone/repository"}, "names no license"),
        ({"source": "someone/repository", "license": []}, "names no license"),
        ({"license": ["MIT"]}, "source of each session"),
        ({"license": ["MIT"], "source": {"one": "a/b"}}, "source of each session"),
    ],
    ids=["no license", "an empty one", "no source", "a session without a source"],
)
def test_a_file_of_recordings_without_license_or_source_is_refused(
    origin: dict[str, object], reason: str, tmp_path: Path
) -> None:
    """It cannot be played by mistake."""
    path = tmp_path / "planted.json.gz"
    sessions: dict[str, list[object]] = {"one": [], "two": []}
    planted = {"instruction": "", "tools": [], "sessions": sessions, **origin}
    path.write_bytes(gzip.compress(json.dumps(planted).encode()))
    with pytest.raises(ValueError, match=reason):
        read_file(path)


def test_whole_lines_that_calls_repeat_are_looked_for_in_the_request() -> None:
    """An edit repeats lines of a file that was read; without it they are missing."""
    recording = read_recording("code", recordings.CODE[:1], 8_000)
    script = RecordedScript(recording)
    place = next(place for place, lines in script.lines.items() if lines)
    script.turn, script.step = place
    request = LlmRequest(contents=[types.UserContent(script.lines[place][0])])
    script.answer(request)
    assert script.missing_lines[place] == script.lines[place][1:]


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
    talk = read_recording("code", recordings.CODE[1:2], 8_000)
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
    values |= {"needed_lines": 4, "missing_lines": 1}
    row = recordings.add_up([counted | values, counted | values])
    ways = dict.fromkeys(recordings.WAYS, row)
    figures = {"some": {"title": "2 sessions, window 8", "turns": 4, "ways": ways}}
    recordings.print_figures(figures, is_markdown=True)
    printed = capsys.readouterr().out.splitlines()
    line = "| Threshold * | 2,000 | 2,000 | 2,000 | 2 | 0.750 | - | 0.750 |"
    assert line in printed
    # The sessions lose turns in each row: their costs cannot be compared.
    assert "| Threshold * | 2,000 | 0.750 | - | 0.750 | - |" in printed

    drawn = _recordings_picture.draw(figures)
    assert drawn.count(">0.75</text>") == len(_recordings_picture.COLORS)
    ElementTree.fromstring(drawn)


def test_first_estimates_are_rated_by_tokenizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The family makes the error small; a tokenizer that is missing is named."""
    texts = {"agents": list(first_estimates.read_agents("airline"))[::20]}
    found = first_estimates.measure(first_estimates.TOKENIZERS["DeepSeek 3"], texts)
    before, family = found["agents"]["before"], found["agents"]["family"]
    assert family["median"] < min(0.03, before["median"])
    assert family["lowest"] > 1

    figures = {
        "texts": {"agents": len(texts["agents"])},
        "tokenizers": {"DeepSeek 3": found},
        "not run": {"Gemma 3": ["llama_cpp"]},
    }
    first_estimates.print_figures(figures)
    printed = capsys.readouterr().out
    assert "DeepSeek 3" in printed
    assert "NOT RUN: Gemma 3 (not installed: llama_cpp)" in printed
