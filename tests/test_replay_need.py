"""`contextguard replay`: what recorded calls needed, and what requests had of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import Session

from contextguard_adk import Threshold
from contextguard_adk._tools.cli import main
from contextguard_adk._tools.replay import ReplaySettings, replay_session
from contextguard_adk._tools.replaying.calls import list_calls
from contextguard_adk._tools.replaying.need import Needs, Share, list_missing
from contextguard_adk.config import CONFIG_VARIABLE, PluginSettings
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import Chat, guarded_agent, queued_tool
from tests.recordings import save

WINDOW = 4_000
PAGES = 3
BOOKING = PAGES + 4
"""The number of the call that needs what the first result had."""

FILLER = "The press in hall B was oiled and its belt was checked again. " * 50
EARLY = "res_QX7731"
ESCAPED = "/srv/hall/b.log"
RESULTS: list[Any] = [
    {"found": [{"id": EARLY, "seats": 1457}], "note": FILLER},
    json.dumps({"log": ESCAPED}).replace("/", "\\/") + FILLER,
    *[FILLER] * (PAGES + 1),
]
SECRET = "sk-proj-abcdefghijklmnop"
SCRIPT: list[Reply] = [
    call("search", hall="Z9-new-1"),  # Stands nowhere before.
    call("search", hall="B"),
    # The newest result has it, escaped.
    call("search", command=f"tail -n 2000 {ESCAPED}; rm -r old", token=SECRET),
    *[call("search", page=number) for number in range(PAGES)],
    call("book", reservation=EARLY, seats=1457, password="plain-Word-1"),
    "Done.",
]


@pytest.fixture(scope="module")
def session() -> Session:
    """A session whose last call needs what its first result had."""

    async def record() -> Session:
        llm = SimulatedLlm(context_window=100_000, script=SCRIPT)
        tools = [queued_tool("search", RESULTS), queued_tool("book", ["Booked."])]
        chat = Chat(guarded_agent(llm, tools))
        await chat.say(f"Find a seat; my key is {SECRET}, my word plain-Word-1.")
        return await chat.session()

    return asyncio.run(record())


def test_what_calls_need_is_found_in_the_request_or_missing(session: Session) -> None:
    """Values that stood before, not new ones and no credentials; escapes are undone,
    and of a missing one it is told where it last stood."""
    calls = list(list_calls(session))
    needs = Needs(session.events, calls)
    found = {}

    for number, made in enumerate(calls, 1):
        whole = [e.content for e in session.events[: made.index] if e.content]
        needed = needs.find(made, whole, WINDOW)
        if needed:
            found[number] = needed
            assert needs.find_missing(needed, whole) == []
            newest = needs.find_missing(needed, whole[-1:])

    assert [each.value for each in found[3]] == [ESCAPED[1:]]
    assert [(n.place, n.calls_ago, n.is_far) for n in found.pop(3)] == [
        ("result of search", 1, False)
    ]
    assert newest == found.pop(BOOKING)
    assert {(n.place, n.calls_ago, n.is_far) for n in newest} == {
        ("result of search", PAGES + 3, True)
    }
    assert not found

    missing = [(BOOKING, each) for each in newest]
    place = f"in a result of search, {PAGES + 3} calls before"
    assert list_missing(missing * 2, most=1) == [
        f"call {BOOKING}: '{EARLY}' was missing; last {place}",
        "and 1 more",
    ]


async def test_a_replay_adds_up_what_its_requests_lack(session: Session) -> None:
    """Without the guard they have all; so has a guard whose window holds all."""
    sums = []
    for window in (WINDOW, 100_000):
        guard = PluginSettings(default=Threshold(context_window=window, trigger=0.25))
        replayed = await replay_session(session, ReplaySettings(guard))
        without = replayed.without_guard
        guarded = replayed.with_guard
        assert (without.need.needed, without.need.missing) == (3, 0)
        missing = [each.value for call in replayed.calls for each in call.missing]
        assert guarded.need == Share(3, len(missing))
        sums.append((missing, guarded.far.needed))

    assert sums[0][1] == 2
    assert sums[1] == ([], 0)


def test_need_stands_beside_tokens_and_money(
    session: Session,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the table of each row, in JSON, as a line, and on the page."""
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    source = str(save(session, tmp_path))
    page = tmp_path / "page.html"
    options = [source, "--window", str(WINDOW)]

    assert main(["replay", *options, "--compare"]) == 0
    _, head, first, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["need", "far"]
    assert first.split()[-2:] == ["100.0%", "100.0%"]

    assert main(["replay", *options, "--compare", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for row, line in zip(found["rows"], rows, strict=False):
        need = row["need"]
        far = row["far"]
        shown = [f"{1 - x['missing'] / x['needed']:.1%}" for x in (need, far)]
        assert line.split()[-2:] == shown

    assert main(["replay", *options]) == 0
    printed = capsys.readouterr().out
    assert "of 3 values that the calls took from the conversation" in printed
    assert "plain-Word" not in printed

    assert main(["report", *options, "-o", str(page)]) == 0
    html = page.read_text("utf-8")
    assert "<strong>Need (simulated):</strong>" in html
    assert "of 3 values that the calls took from the conversation" in html
