"""Large tool results are shown head and tail from their first request on."""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk import Pipeline, SlidingWindow, Threshold
from contextguard_adk.strategies import Strategy, ToolOutputTruncation
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm, call
from contextguard_adk.testing.provider import count_tokens
from tests.builders import (
    Chat,
    answer_text,
    queued_tool,
    user,
)
from tests.chats import DEMAND, Changing, guarded_chat, summary_requests, words
from tests.noted import note

WINDOW = 16_000
MOST = 800
"""What a result may take by default, unless the window is large."""

HANDLE = "recall_item"
FACTS = [f"the key of host-{n} is key-{n}{n}{n}-gamma" for n in range(3)]
RANDOM = random.Random(11)


def report(facts: Sequence[str] = FACTS, tokens: int = 8_000) -> str:
    """A large result with facts in its middle."""
    around = words(tokens // 2)
    return "\n".join([around, *(f"{fact}\n{words(200)}" for fact in facts), around])


def results(request: RecordedRequest) -> list[types.FunctionResponse]:
    """The tool results in a request."""
    parts = [part for content in request.contents for part in content.parts or ()]
    return [part.function_response for part in parts if part.function_response]


def payloads(request: RecordedRequest, tool: str = "read") -> list[dict[str, Any]]:
    """What the results of a tool say in a request."""
    return [r.response or {} for r in results(request) if r.name == tool]


def open_chat(
    result: Any,
    *,
    strategy: Strategy | None = None,
    script: Sequence[Reply] = (),
    agent: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[SimulatedLlm, Chat]:
    """A chat whose agent reads once, with its model."""
    script = [call("read", step=1), "Read.", *script]
    llm = SimulatedLlm(context_window=100_000, script=script)
    chosen = strategy or Threshold(context_window=WINDOW)
    agent = {"tools": [queued_tool("read", [result])], **(agent or {})}
    return llm, guarded_chat(llm, chosen, agent=agent, **settings)


async def read(result: Any, **settings: Any) -> dict[str, Any]:
    """What the agent is shown of a result."""
    llm, chat = open_chat(result, **settings)
    assert answer_text(await chat.say("Read.")) == "Read."
    [shown] = payloads(llm.requests[-1])
    return shown


@pytest.mark.parametrize("kind", [Threshold, SlidingWindow])
async def test_a_large_result_is_shown_alike_in_every_request(
    kind: type[Strategy], tmp_path: Path
) -> None:
    """Beside parallel calls, in later turns and in another process."""
    from google.adk.sessions import DatabaseSessionService

    reading: list[Reply] = [[call("read", step=1), call("look", step=1)], "Read."]
    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    agent = {"tools": [queued_tool("read", [report()]), queued_tool("look", ["ok"])]}
    shown: list[str] = []
    for script in (reading, ["Later."]):
        service = DatabaseSessionService(url)
        llm = SimulatedLlm(context_window=WINDOW, script=[*script, "Later."])
        strategy = kind(context_window=WINDOW)
        chat = guarded_chat(llm, strategy, agent=agent, session_service=service)
        for _ in range(2):
            await chat.say("Go on.")
        assert llm.rejections == llm.violations == llm.summaries == 0
        found = [found for r in llm.requests for found in results(r)]
        shown += [r.model_dump_json() for r in found if r.name == "read"]
        looked = [r.response for r in found if r.name == "look"]
        assert looked == [{"result": "ok"}] * len(looked)
        await service.close()
    assert len(shown) == 4
    [only] = set(shown)
    assert HANDLE in only
    assert count_tokens([only], None) <= 1.1 * MOST


async def test_the_whole_original_is_recalled_page_by_page() -> None:
    """Under the handle that the preview names; pages are never cut themselves."""
    original = report(tokens=4_500)
    pages = list[str]()
    told = ""

    def script(request: LlmRequest) -> Reply:
        nonlocal told
        last = (request.contents[-1].parts or [types.Part()])[0].function_response
        if last is None:
            return call("read", step=1)
        said = (last.response or {})["result"]
        if last.name == "read":
            told = note(last.response or {}, HANDLE)
        else:
            body, _, tail = said.partition("\n")[2].rpartition("\n")
            pages.append(body)
            if "end of the item" in tail:
                return "Done."
        return call("recall_history", item=told, offset=len("".join(pages)))

    strategy = Threshold(context_window=40_000, preview_tokens=150)
    llm, chat = open_chat(original, strategy=strategy)
    llm.script = script
    assert answer_text(await chat.say("Read.")) == "Done."
    assert "".join(pages) == original
    assert len(pages) > 2
    shown = payloads(llm.requests[-1], "recall_history")
    assert not any(note(page, HANDLE) for page in shown)


async def test_only_what_is_long_is_cut() -> None:
    """Other keys stay beside a long string; many short ones are cut as JSON."""
    shown = await read({"status": "ok", "log": report(), "rows": [1, {"a": None}]})
    assert list(shown) == ["status", "log", "rows", "not_shown", HANDLE]
    assert (shown["status"], shown["rows"]) == ("ok", [1, {"a": None}])
    assert shown["log"].startswith(words(100))
    assert "truncated" in shown["log"]

    rows = [{"id": number, "name": f"host-{number}"} for number in range(600)]
    shown = await read({"rows": rows})
    assert list(shown) == ["result"]
    assert note(shown, "not_shown")
    assert note(shown, HANDLE)
    assert shown["result"].startswith('{"rows":[{"id":0,"name":"host-0"}')
    assert "host-599" in shown["result"]
    # Quotes that are escaped again take more than is estimated.
    assert count_tokens([shown["result"]], None) <= 1.2 * MOST


TEN = "0123456789"
STRINGS = {"a": TEN, "b": f"{TEN}a", "c": "😀" * 12, "y" * 12: [1]}
TAILS = {**STRINGS, "b": "0129a", "c": "😀" * 5}


async def test_a_pipeline_shortens_strings_wherever_they_stand() -> None:
    """Parallel results keep their names and ids."""
    truncation = ToolOutputTruncation(
        max_length=10,
        smart_truncate=True,
        head_length=3,
        tail_length=2,
        show_truncation_notice=False,
        preserve_last_tool_result=False,
    )
    strategy = Pipeline(context_window=WINDOW, tool_output=truncation)

    short = {"rows": [{"id": number} for number in range(100)]}
    tools = [queued_tool("read", [{"in": [STRINGS]}]), queued_tool("look", [short])]
    llm, chat = open_chat("", strategy=strategy, agent={"tools": tools})
    llm.script = [[call("read", step=1), call("look", step=1)], "Read."]
    await chat.say("y" * 50)

    said, called, _ = llm.requests[-1].contents
    assert said == user("y" * 50)
    calls = [part.function_call for part in called.parts or ()]
    found = results(llm.requests[-1])
    named = [[(each.name, each.id) for each in side if each] for side in (calls, found)]
    assert named[0] == named[1]

    shown, looked = [each.response or {} for each in found]
    assert looked == short
    assert HANDLE in shown
    assert shown["in"] == [TAILS]


@pytest.mark.parametrize("result", [words(600), {"a": [1, "x"], "b": None}, []])
async def test_small_results_stay_as_they_are(result: Any) -> None:
    """Nothing is added to them, and no tool is offered because of them."""
    llm, chat = open_chat(result)
    await chat.say("Read.")
    wanted = result if isinstance(result, dict) else {"result": result}
    assert payloads(llm.requests[-1]) == [wanted]
    assert "recall_history" not in str(llm.requests[-1].config.tools)


REPORT = report()
LONGER = report(tokens=12_000)
DENSE = {
    "base64": base64.b64encode(RANDOM.randbytes(10_000)).decode(),
    "digits": "\n".join(f"{RANDOM.gauss(240, 80):.3f}" for _ in range(1_500)),
    "chinese": "部署令牌是七号机器的密钥, 第三台在二楼。" * 900,
}
LARGE: dict[str, Any] = {"context_window": 100_000, "trigger": "auto"}
SHOWN: dict[str, tuple[str, dict[str, Any], int | None]] = {
    **{kind: (text, {}, MOST) for kind, text in DENSE.items()},
    "part of the window": (DENSE["digits"], {"preview_tokens": 0.1}, WINDOW // 10),
    "no recall": (REPORT, {"recall": False}, None),
    "no recall, tokens": (REPORT, {"recall": False, "preview_tokens": 1_000}, 1_000),
    "none": (REPORT, {"preview_tokens": False}, None),  # TOML has no None.
    "observing": (REPORT, {"observe": True}, None),
    # Of 5/4 of the trigger, whatever the window.
    "automatic trigger": (LONGER, {**LARGE, "preview_tokens": 0.05}, 2_000),
    "a large window": (LONGER, {"context_window": 60_000}, 1_500),
    "a small window": (REPORT, {"context_window": 8_000}, 800),
}


@pytest.mark.parametrize(("result", "settings", "most"), SHOWN.values(), ids=SHOWN)
async def test_what_is_shown_stays_within_the_setting(
    result: str, settings: dict[str, Any], most: int | None
) -> None:
    """What nobody could read back is cut only where it is asked for."""
    settings = {"context_window": WINDOW, **settings}
    guard = {"observe": settings.pop("observe", False)}
    shown = await read(result, strategy=Threshold(**settings), guard=guard)
    if most is None:
        assert shown == {"result": result}
        return
    assert bool(note(shown, HANDLE)) is settings.get("recall", True)
    assert "truncated" in shown["result"]

    tokens = count_tokens(
        [types.FunctionResponse(response=shown).model_dump_json()], None
    )
    assert 0.6 * most < tokens <= 1.1 * most


async def test_the_preview_is_of_what_another_plugin_left() -> None:
    """What it masked is neither shown nor recalled."""

    def mask(request: LlmRequest) -> None:
        for content in request.contents:
            for part in content.parts or ():
                if part.function_response and part.function_response.name == "read":
                    masked = report().replace("gamma", "****")
                    part.function_response.response = {"result": masked}

    recall = call("recall_history", query="key of host-1")
    llm, chat = open_chat(report(), script=[recall, "Found."], before=[Changing(mask)])
    await chat.say("Read.")
    await chat.say("Which key?")
    assert "gamma" not in llm.requests[-1].text
    shown = [payloads(request) for request in llm.requests[1:]]
    assert all(each == shown[0] for each in shown)


PATHS = [f"src/app/module_{number}.py" for number in range(20)]
LISTING = "\n".join([words(5_000), *PATHS, words(5_000)])


async def test_names_are_of_the_whole_result_where_it_is_shortened_twice() -> None:
    """`Pipeline` cuts long strings before the preview does; both hide the middle."""
    shown = await read(LISTING, strategy=Pipeline(context_window=WINDOW))
    assert shown["result"].count(PATHS[0]) == 1
    assert note(shown, "not_shown").split(", ") == PATHS


async def test_a_summarizer_reads_the_whole_of_what_was_shown_in_part() -> None:
    """Each value stands once, in the result; a tool's own field `not_shown` is read."""
    results = [LISTING, {"not_shown": "my own field"}]
    llm = SimulatedLlm(script=[call("read", n=1), call("read", n=2), "Read.", "Done."])
    agent = {"tools": [queued_tool("read", results)]}
    settings: Any = {"context_window": WINDOW, "summarizer_context_window": 100_000}
    chat = guarded_chat(llm, Threshold(**settings), agent=agent)
    await chat.say("Read.")
    assert "truncated" in llm.requests[-1].text
    assert LISTING not in llm.requests[-1].text
    assert PATHS[7] in llm.requests[-1].text

    await chat.set_state(DEMAND)
    await chat.say("And now?")
    [asked] = summary_requests(llm)
    assert "truncated" not in asked.text
    assert all(asked.text.count(path) == 1 for path in PATHS)
    assert LISTING in asked.text.replace("\n  ", "\n")
    assert "my own field" in asked.text
