"""Large tool results are shown head and tail from their first request on."""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google.adk
import pytest
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import DatabaseSessionService
from google.genai import types
from pydantic import BaseModel

from contextguard_adk import (
    ContextGuardPlugin,
    SlidingWindow,
    Strategy,
    Threshold,
)
from contextguard_adk._history.truncation import Preview
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm, call
from contextguard_adk.testing.provider import count_tokens
from tests.builders import (
    SUMMARY_BEGIN,
    Chat,
    answer_text,
    model,
    queued_tool,
    response,
    user,
)
from tests.builders import call as made_call
from tests.chats import Changing, agent_requests, guarded_chat, seed, words

WINDOW = 16_000
MOST = int(0.2 * WINDOW)
"""What a result may take by default."""

HANDLE = "recall_item"
FACTS = [f"the key of host-{n} is key-{n}{n}{n}-gamma" for n in range(3)]
RANDOM = random.Random(11)
both_strategies = pytest.mark.parametrize("kind", [Threshold, SlidingWindow])


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
    llm = SimulatedLlm(
        context_window=100_000, script=[call("read", step=1), "Read.", *script]
    )
    chosen = strategy or Threshold(context_window=WINDOW)
    agent = {"tools": [queued_tool("read", [result])], **(agent or {})}
    return llm, guarded_chat(llm, chosen, agent=agent, **settings)


async def read(result: Any, **settings: Any) -> dict[str, Any]:
    """What the agent is shown of a result."""
    llm, chat = open_chat(result, **settings)
    assert answer_text(await chat.say("Read.")) == "Read."
    [shown] = payloads(llm.requests[-1])
    return shown


@both_strategies
async def test_a_large_result_is_shown_alike_in_every_request(
    kind: type[Strategy], tmp_path: Path
) -> None:
    """Beside parallel calls, in later turns and in another process."""
    reading: list[Reply] = [[call("read", step=1), call("look", step=1)], "Read."]
    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    tools = [queued_tool("read", [report()]), queued_tool("look", ["ok"])]
    shown: list[str] = []
    for script in (reading, ["Later."]):
        service = DatabaseSessionService(url)
        llm = SimulatedLlm(context_window=WINDOW, script=[*script, "Later."])
        chat = guarded_chat(
            llm,
            kind(context_window=WINDOW),
            agent={"tools": tools},
            session_service=service,
        )
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


async def test_it_stays_alike_beside_a_summary() -> None:
    """A compaction that leaves the step leaves its preview."""
    script: list[Reply] = [call("read", step=1)]
    script += [*[call("look", step=n) for n in range(9)], "Done."]
    llm = SimulatedLlm(context_window=WINDOW, script=script, token_ratio=1.0)
    tools = [queued_tool("read", [report()]), queued_tool("look", [words(700)])]
    strategy = Threshold(context_window=WINDOW, keep=0.6)
    chat = guarded_chat(llm, strategy, agent={"tools": tools})
    await seed(chat, user("Earlier."), model(words(5_000)))
    await chat.say("Read, then look.")
    shown = [r for r in agent_requests(llm) if payloads(r)]
    assert any(SUMMARY_BEGIN in request.text for request in shown)
    assert HANDLE in payloads(shown[0])[0]
    assert all(payloads(request) == payloads(shown[0]) for request in shown)


@pytest.mark.parametrize("fact", FACTS)
async def test_what_is_left_out_is_recalled_before_any_compaction(fact: str) -> None:
    """Each fact is on the first page of one search."""
    name = fact.split(" is ")[0]
    recall = call("recall_history", query=name.removeprefix("the "))
    llm, chat = open_chat(report(), script=[recall, "Found."])
    await chat.say("Read.")
    assert fact not in llm.requests[-1].text
    await chat.say("Which key?")
    [page] = payloads(llm.requests[-1], "recall_history")
    assert fact in page["result"]
    assert llm.summaries == 0


async def test_the_whole_original_is_recalled_page_by_page() -> None:
    """Under the handle that the preview names; pages are never cut themselves."""
    original, pages, told = report(tokens=4_500), list[str](), ""

    def script(request: LlmRequest) -> Reply:
        nonlocal told
        last = (request.contents[-1].parts or [types.Part()])[0].function_response
        if last is None:
            return call("read", step=1)
        said = (last.response or {})["result"]
        if last.name == "read":
            told = (last.response or {})[HANDLE]
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
    assert all(HANDLE not in page for page in shown)


async def test_media_are_left_alone() -> None:
    """An image in a result stays with it, one of the user's stays where it is."""
    image = types.Blob(data=b"\x89PNG" * 9_000, mime_type="image/png")

    class Photographer(BasePlugin):
        async def on_event_callback(
            self, *, invocation_context: Any, event: Event
        ) -> None:
            for each in event.get_function_responses():
                each.parts = [
                    types.FunctionResponsePart.from_bytes(
                        data=image.data or b"", mime_type="image/png"
                    )
                ]

    llm, chat = open_chat(report(), before=[Photographer("photographer")])
    said = [types.Part(text="Read."), types.Part(inline_data=image)]
    await chat.say(types.Content(role="user", parts=said))
    [shown] = results(llm.requests[-1])
    assert HANDLE in (shown.response or {})
    [kept] = shown.parts or []
    assert kept.inline_data
    assert kept.inline_data.data == image.data
    assert llm.requests[-1].contents[0].parts == said


async def test_other_keys_stay_beside_a_long_string() -> None:
    """Only what is long is cut."""
    shown = await read({"status": "ok", "log": report(), "rows": [1, {"a": None}]})
    assert list(shown) == ["status", "log", "rows", HANDLE]
    assert (shown["status"], shown["rows"]) == ("ok", [1, {"a": None}])
    assert shown["log"].startswith(words(100))
    assert "truncated" in shown["log"]


async def test_many_short_strings_become_head_and_tail_of_their_json() -> None:
    """There is no long string to cut."""
    rows = [{"id": number, "name": f"host-{number}"} for number in range(3_000)]
    shown = await read({"rows": rows})
    assert list(shown) == ["result", HANDLE]
    assert shown["result"].startswith('{"rows":[{"id":0,"name":"host-0"}')
    assert "host-2999" in shown["result"]
    # Quotes that are escaped again take more than is estimated.
    assert count_tokens([shown["result"]], None) <= 1.2 * MOST


@pytest.mark.skipif(
    google.adk.__version__.startswith("2.0."), reason="it copies payloads for each call"
)
async def test_a_preview_is_made_once_in_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of results of earlier runs, and not for each model call anew."""
    made: list[object] = []
    cut = Preview._fit

    def note(self: Preview, *arguments: Any) -> types.Part:
        made.append(arguments[0])
        return cut(self, *arguments)

    looking: list[Reply] = [call("look", step=n) for n in range(5)]
    tools = [queued_tool("read", [report()]), queued_tool("look", ["ok"])]
    script = [*looking, "Looked."]
    llm, chat = open_chat(report(), script=script, agent={"tools": tools})
    await chat.say("Read.")
    monkeypatch.setattr(Preview, "_fit", note)
    assert answer_text(await chat.say("Look.")) == "Looked."
    assert len(llm.requests) == 8
    assert len(made) == 1


@pytest.mark.parametrize("result", [words(2_500), {"a": [1, "x"], "b": None}, []])
async def test_small_results_stay_as_they_are(result: Any) -> None:
    """Nothing is added to them, and no tool is offered because of them."""
    llm, chat = open_chat(result)
    await chat.say("Read.")
    wanted = result if isinstance(result, dict) else {"result": result}
    assert payloads(llm.requests[-1]) == [wanted]
    assert "recall_history" not in str(llm.requests[-1].config.tools)


DENSE = {
    "base64": base64.b64encode(RANDOM.randbytes(40_000)).decode(),
    "digits": "\n".join(f"{RANDOM.gauss(240, 80):.3f}" for _ in range(6_000)),
    "chinese": "部署令牌是七号机器的密钥, 第三台在二楼。" * 900,
}


@pytest.mark.parametrize("result", DENSE.values(), ids=DENSE)
@pytest.mark.parametrize(
    ("given", "most_tokens"), [(None, MOST), (1_000, 1_000), (0.1, WINDOW // 10)]
)
async def test_dense_results_stay_within_the_setting(
    result: Any, given: float | None, most_tokens: int
) -> None:
    """As BPE counts them; in tokens or as a part of the window."""
    preview: dict[str, Any] = {} if given is None else {"preview_tokens": given}
    strategy = Threshold(context_window=WINDOW, **preview)
    llm, chat = open_chat(result, strategy=strategy)
    await chat.say("Read.")
    [shown] = results(llm.requests[-1])
    assert HANDLE in (shown.response or {})
    text = shown.model_dump_json(include={"response"})
    assert 0.6 * most_tokens < count_tokens([text], None) <= 1.1 * most_tokens


class Verdict(BaseModel):
    """What an agent may have to answer."""

    text: str


@pytest.mark.parametrize(
    "given", [None, 1_000, 0.2], ids=["default", "tokens", "as by default"]
)
async def test_without_recall_only_a_given_setting_cuts(given: float | None) -> None:
    """Nobody could read the rest; then there is no handle either."""
    preview: dict[str, Any] = {} if given is None else {"preview_tokens": given}
    strategy = Threshold(context_window=WINDOW, recall=False, **preview)
    shown = await read(report(), strategy=strategy)
    assert HANDLE not in shown
    assert ("truncated" in shown["result"]) is (given is not None)


async def test_an_output_schema_leaves_results_whole() -> None:
    """Such an agent is offered no recall."""
    llm = SimulatedLlm(context_window=100_000, script=['{"text": "ok"}'])
    chat = guarded_chat(
        llm, Threshold(context_window=WINDOW), agent={"output_schema": Verdict}
    )
    await seed(
        chat, user("Go."), made_call("read"), response("read", report(tokens=5_000))
    )
    await chat.say("Judge.")
    assert payloads(llm.requests[-1]) == [{"result": report(tokens=5_000)}]


@pytest.mark.parametrize(("given", "most"), [(None, 4_000), (0.2, 8_000)])
async def test_the_automatic_trigger_cuts_more_by_default(
    given: float | None, most: int
) -> None:
    """From 4,000 tokens on, whatever the window; what the user says stands."""
    preview: dict[str, Any] = {} if given is None else {"preview_tokens": given}
    strategy = Threshold(context_window=100_000, trigger="auto", **preview)
    shown = await read(report(tokens=20_000), strategy=strategy)
    assert 0.8 * most < count_tokens([shown["result"]], None) <= 1.1 * most


async def test_none_shows_results_whole() -> None:
    """As long as they fit."""
    strategy = Threshold(context_window=WINDOW, preview_tokens=None)
    assert await read(report(), strategy=strategy) == {"result": report()}


async def test_observing_changes_nothing() -> None:
    """Not even what is large."""
    shown = await read(report(), guard={"observe": True})
    assert shown == {"result": report()}


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


def test_false_in_a_file_is_none(tmp_path: Path) -> None:
    """TOML has no other word for it."""
    path = tmp_path / "guard.toml"
    path.write_text("[default]\npreview_tokens = false", "utf-8")
    wanted = Threshold(preview_tokens=None)
    assert ContextGuardPlugin.from_file(path)._settings.default == wanted
