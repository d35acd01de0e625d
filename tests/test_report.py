"""The command line: `contextguard report`, and what its page says of a session."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.adk.events.event import Event
from google.adk.sessions import Session
from google.genai import types

from contextguard_adk import CallRecord, ContextGuardPlugin, Pipeline, Threshold
from contextguard_adk._tools.cli import main
from contextguard_adk.config import CONFIG_VARIABLE
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, call_part, guarded_agent, model, queued_tool, user
from tests.test_replay import CALLS, FINDINGS, PLACE, WINDOW, record

PRICES = """
[prices.simulated]
input = 1.0
cached_input = 0.25
output = 4.0
"""
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028`${1}"


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def write_page(session: Session, folder: Path, *arguments: str) -> str:
    """Has the command write the page about a session; returns it."""
    source, page = folder / "session.json", folder / "page.html"
    source.write_text(session.model_dump_json(by_alias=True))
    assert main(["report", str(source), "-o", str(page), *arguments]) == 0
    return page.read_text("utf-8")


def read_data(page: str) -> dict[str, Any]:
    """What the charts of a page show."""
    found = re.search(r'(?s)<script type="application/json" id="data">(.*?)</scr', page)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture(scope="module")
def guarded() -> tuple[Session, list[CallRecord]]:
    """A session with a guard, and the guard's records."""
    records: list[CallRecord] = []
    guard = ContextGuardPlugin(
        default=Threshold(context_window=WINDOW), on_call=records.append
    )
    return asyncio.run(record([guard], has_cache=True))[0], records


def test_the_page_tells_what_the_guard_did(
    guarded: tuple[Session, list[CallRecord]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Calls, window, tokens, money and each compaction are those of the recording."""
    session, records = guarded
    for event in session.events:
        if event.usage_metadata:
            event.model_version = "simulated"
    config = tmp_path / "guard.toml"
    config.write_text(PRICES)
    page = write_page(session, tmp_path, "--config", str(config))
    data = read_data(page)
    compactions = [record.compaction for record in records if record.compaction]
    assert len(compactions) >= 2
    assert f"model calls: {CALLS}, compactions: {len(compactions)}" in (
        capsys.readouterr().out
    )
    assert data["prompt"] == [record.real_tokens for record in records]
    assert data["cached"] == [record.usage.cached_tokens for record in records]
    assert data["output"] == [record.usage.output_tokens for record in records]
    assert data["compactions"] == [record.compaction is not None for record in records]
    assert {*data["window"]} == {WINDOW}
    assert {*data["threshold"]} == {0.8 * WINDOW}
    used = [record.compaction.usage for record in records if record.compaction]
    summaries = [usage.prompt_tokens + usage.output_tokens for usage in used]
    assert [tokens for tokens in data["summaries"] if tokens] == summaries
    uncached, cached, output = map(
        sum, (data["uncached"], data["cached"], data["output"])
    )
    for usage in used:
        uncached += usage.prompt_tokens - usage.cached_tokens
        cached += usage.cached_tokens
        output += usage.output_tokens
    dollars = (uncached + 0.25 * cached + 4 * output) / 1e6
    assert data["money"][-1] == pytest.approx(dollars)
    assert data["isGuarded"]
    # Without it, requests would have grown on.
    first = data["compactions"].index(True)
    assert data["other"][:first] == data["prompt"][:first]
    pairs = list(zip(data["other"], data["prompt"], strict=True))
    assert all(without > sent for without, sent in pairs[first:])
    cards = page.split("<article")[1:]
    assert len(cards) == len(compactions)
    for card, done in zip(cards, compactions, strict=True):
        assert f"<dd>{done.tokens_before:,} → {done.tokens_after:,}</dd>" in card
        assert f"<dd>{done.contents_before} → {done.contents_after}</dd>" in card
        assert "<dd>Threshold</dd>" in card
        assert "result of search, " in card
        assert "What the summary says" in card
    stored = session.state["__context_guard_summary_agent"]
    assert stored in html.unescape(cards[-1])


async def test_what_is_said_again_is_taken_out_again(tmp_path: Path) -> None:
    """A rewind takes a summary back; the next one covers the same once more."""
    script = [call_part("search")] * 12 + ["Done."]
    llm = SimulatedLlm(model="simulated", context_window=100_000, script=script * 2)
    guard = ContextGuardPlugin(default=Threshold(context_window=WINDOW))
    chat = Chat(guarded_agent(llm, [queued_tool("search", FINDINGS)]), [guard])
    await chat.say("Where is it?")
    first = await chat.sessions.get_session(**PLACE)
    assert first
    await chat.runner.rewind_async(
        user_id="user",
        session_id="session",
        rewind_before_invocation_id=first.events[0].invocation_id,
    )
    await chat.say("Where is it?")
    session = await chat.sessions.get_session(**PLACE)
    assert session
    page = await asyncio.to_thread(write_page, session, tmp_path)
    counts = re.findall(r"What it took out: (\d+) messages", page)
    assert len(counts) >= 2
    assert counts[len(counts) // 2 :] == counts[: len(counts) // 2]


def test_without_a_guard_the_page_shows_a_simulation(tmp_path: Path) -> None:
    """What the replay finds stands beside what was recorded, and is labelled."""
    session, _ = asyncio.run(record())
    page = write_page(session, tmp_path, "--context-window", str(WINDOW))
    data = read_data(page)
    assert not data["isGuarded"]
    assert max(data["prompt"]) > WINDOW >= max(data["other"])
    assert not any(data["summaries"])
    cards = page.split("<article")[1:]
    assert len(cards) == sum(data["compactions"]) >= 2
    for card in cards:
        assert "(simulated)</h3>" in card
        assert "What it took out: " in card
        assert "What the summary says" not in card
    assert "compactions are a simulation" in page


async def test_a_compaction_without_a_summary_is_told(tmp_path: Path) -> None:
    """A pipeline drops messages, and asks no model."""
    guard = ContextGuardPlugin(default=Pipeline(context_window=WINDOW))
    session, _ = await record([guard])
    page = await asyncio.to_thread(write_page, session, tmp_path)
    card = page.split("<article")[1]
    assert "<dd>Pipeline</dd>" in card
    assert "<dd>none asked</dd>" in card


def test_what_a_session_says_cannot_act(
    guarded: tuple[Session, list[CallRecord]], tmp_path: Path
) -> None:
    """Markup in ids, texts, tools, summaries and metadata is shown as it stands."""
    session = guarded[0].model_copy(deep=True)
    session.id = session.app_name = session.user_id = EVIL
    asked = types.ModelContent([call_part(EVIL, path=EVIL), types.Part(text=EVIL)])
    for event in session.events:
        event.model_version = event.model_version and EVIL
        if "__context_guard_summary_agent" in event.actions.state_delta:
            event.actions.state_delta["__context_guard_summary_agent"] = EVIL
        if note := (event.custom_metadata or {}).get("context_guard"):
            fields = ("strategy", "reason", "model", "mechanical", "tokens_before")
            note["compaction"].update(dict.fromkeys(fields, EVIL), usage=EVIL)
    last = session.events[-1]
    session.events.append(
        Event(author="agent", content=asked, usage_metadata=last.usage_metadata)
    )
    page = write_page(session, tmp_path)

    assert page.count("<script") == page.count("</script>") == 3
    assert "<img" not in page
    assert "\u2028" not in read_raw_data(page)
    assert page.count(html.escape(EVIL)) > 5
    said = str(read_data(page)["facts"][-1]["tools called"])
    assert said == EVIL
    # The policy names our scripts and style by what is in them, and nothing else.
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    scripts = re.findall(r"(?s)<script>(.*?)</script>", page)
    styles = re.findall(r"(?s)<style>(.*?)</style>", page)
    digests = [hashlib.sha256(text.encode()).digest() for text in [*scripts, *styles]]
    names = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    assert policy[1] == (
        f"default-src 'none'; script-src {names[0]} {names[1]}; style-src {names[2]}; "
        "base-uri 'none'; form-action 'none'"
    )
    assert "http://" not in re.sub(r"(?s)<script.*?</script>", "", page)
    assert "sourceMappingURL" not in page


def read_raw_data(page: str) -> str:
    """The text of the JSON in a page."""
    return page.partition('id="data">')[2].partition("</script>")[0]


@pytest.mark.parametrize(
    "facts", [None, 7, "x", {}, {"compaction": 3}, {"window": "x"}]
)
def test_strange_metadata_is_no_compaction(tmp_path: Path, facts: Any) -> None:
    """Whatever stands where the guard writes what it did."""
    usage = types.GenerateContentResponseUsageMetadata(prompt_token_count=50)
    events = [
        Event(author="user", content=user("Hello")),
        Event(
            author="agent",
            content=model("Hi."),
            usage_metadata=usage,
            custom_metadata={"context_guard": facts},
        ),
    ]
    session = Session(id="s", app_name="app", user_id="user", events=events)
    data = read_data(write_page(session, tmp_path))
    assert data["compactions"] == [False]


def test_a_page_that_cannot_be_written_is_one_line(
    guarded: tuple[Session, list[CallRecord]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder is missing, for instance."""
    source = tmp_path / "session.json"
    source.write_text(guarded[0].model_dump_json())
    page = tmp_path / "none" / "page.html"
    assert main(["report", str(source), "-o", str(page)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("contextguard report: error: ")
    assert "page.html: cannot be written: No such file" in error
