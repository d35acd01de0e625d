"""One model call under the guard: what is sent, and what state holds afterwards."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from google.adk.agents.run_config import RunConfig
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk import CallRecord, ContextGuardPlugin, SlidingWindow, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests import builders, chats
from tests.builders import (
    Chat,
    RequestTap,
    answer_text,
    guarded_agent,
    model,
    queued_tool,
    response,
    user,
)
from tests.chats import (
    EXACT,
    HEURISTIC,
    REAL,
    Changing,
    agent_requests,
    seed,
    summary_requests,
    take_apart,
    text_of,
    words,
)
from tests.guarded import (
    NOW,
    SMALL,
    SUMMARY_BEGINS,
    WINDOW,
    guarded_chat,
    is_compacted,
    long_chat,
    original,
)

IMAGE = types.Part(inline_data=types.Blob(mime_type="image/png", data=b"\x89PNG" * 9))
TWENTY: dict[str, Any] = {"context_window": 20_000, "token_ratio": 1.0}


def ids_of(requests: Iterable[Iterable[types.Content]]) -> list[list[int]]:
    """Which objects the contents of each request are."""
    return [[id(content) for content in contents] for contents in requests]


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_small_requests_leave_as_they_came(is_streaming: bool) -> None:
    """The same list with the same contents is sent; two numbers and a line for people
    are stored. Nothing says "compacted"."""
    before = RequestTap("before")
    after = RequestTap("after")
    llm = SimulatedLlm(script=[call("look"), "Found.", "Bye."])
    agent = guarded_agent(llm, [queued_tool("look", [{"n": [1, {"x": None}]}])])
    strategy = SlidingWindow if is_streaming else Threshold
    guard = ContextGuardPlugin(default=strategy(context_window=WINDOW))
    chat = Chat(agent, [before, guard, after], is_streaming=is_streaming)
    answers = [answer_text(await chat.say(text)) for text in ("Look!", "Thanks.")]
    assert answers == ["Found.", "Bye."]
    assert ids_of(before.contents) == ids_of(after.contents)
    assert [id(c) for c in before.lists] == [id(c) for c in after.lists]

    assert [*await chat.state()] == ["context_guard:usage:agent", REAL, HEURISTIC]


async def test_summary_stays_on_later_calls_turns_and_processes() -> None:
    """Every later request begins with the same bytes; the rest is appended."""
    llm = SimulatedLlm(script=[call("look"), "Found.", call("look"), "Bye."])
    chat = await long_chat(llm, tools=[queued_tool("look", ["a result"])])
    await chat.say("And now?")
    tools = [queued_tool("look", [])]
    successor = guarded_chat(llm, chat={"session_service": chat.sessions}, tools=tools)
    await successor.say("Thanks.")

    first, *later = agent_requests(llm)
    [head] = first.contents
    assert len(head.parts or ()) == 1
    assert [text_of(each)[:32] for each in take_apart([head])] == [
        SUMMARY_BEGINS,
        "[System: The conversation was co",
    ]

    for request in later:
        assert request.contents[0] == head
        assert "ORIGINAL" not in request.text
    assert [len(request.contents) for request in later] == [3, 5, 7, 9]
    assert text_of(later[-1].contents[4]) == "And now?"
    assert llm.summaries == 1


async def test_compaction_does_not_fire_on_two_successive_calls() -> None:
    """Between threshold and 97 % of the window the call after a compaction waits."""
    llm = SimulatedLlm(**TWENTY, summary_replies=["Part one.", "Part two."])
    chat = guarded_chat(llm)
    await chat.say("Hello.")
    await seed(chat, user("The task."), original(3_300))
    await chat.say("Go on.")
    await seed(chat, user("More."), original(3_100))
    await chat.say("Go on.")
    await chat.say("Go on.")
    kinds = [request.is_summary for request in llm.requests]

    assert kinds == [False, True, False, False, True, False]
    assert 3_200 <= llm.requests[3].prompt_tokens < 3_880


async def test_overfull_requests_do_not_wait() -> None:
    """Above 97 % of the window even the call after a compaction is compacted."""
    llm = SimulatedLlm(
        context_window=WINDOW, token_ratio=1.0, script=[call("look"), "Done."]
    )
    tools = [queued_tool("look", [words(3_700)])]
    strategy = Threshold(context_window=WINDOW, preview_tokens=None)
    chat = await long_chat(llm, 2_500, strategy=strategy, tools=tools)

    assert answer_text(await chat.events()) == "Done."
    assert llm.rejections == 0
    assert all(request.prompt_tokens < 3_200 for request in agent_requests(llm))


@pytest.mark.skipif(
    "model_input_context" not in RunConfig.model_fields,
    reason="this ADK has no model_input_context",
)
async def test_transient_context_is_neither_summarized_nor_dropped() -> None:
    """What the run configuration adds to each request stays in each request."""
    added = {"model_input_context": [user("The weather is fine.")]}
    llm = SimulatedLlm(script=["One.", "Two."])
    chat = await long_chat(llm, chat={"run_config": RunConfig.model_validate(added)})
    await chat.say("And now?")
    assert llm.summaries == 1
    assert "weather" not in summary_requests(llm)[0].text
    for request in agent_requests(llm):
        assert request.text.count("The weather is fine.") == 1


async def test_images_of_the_live_message_ride_on_the_continuation() -> None:
    """What the user shows is shown again after a compaction, and later."""
    llm = SimulatedLlm()
    chat = guarded_chat(llm)
    await seed(chat, user("The task."), original())
    message = types.Content(
        role="user", parts=[types.Part(text="What is on it?"), IMAGE]
    )
    await chat.say(message)
    await chat.say("And now?")
    for request in agent_requests(llm):
        continuation = take_apart(request.contents)[1]
        assert "`What is on it?`" in text_of(continuation)
        assert (continuation.parts or [])[1:] == [IMAGE]

    assert "[attached image/png, 36 bytes]" in summary_requests(llm)[0].text


async def test_repeated_messages_are_not_mistaken_for_covered_ones() -> None:
    """A user who says the same again is heard again."""
    llm = SimulatedLlm(script=["One.", "Two.", "Three.", "Four.", "Five."])
    chat = guarded_chat(llm)
    await chat.say("yes")
    await chat.say("yes")
    await seed(chat, user("The task."), original())
    await chat.say("yes")
    assert llm.summaries == 1

    for answer in ("Four.", "Five."):
        assert answer_text(await chat.say("yes")) == answer
        assert text_of(llm.requests[-1].contents[-1]) == "yes"

    texts = [text_of(content) for content in llm.requests[-1].contents[1:]]
    assert texts == ["Three.", "yes", "Four.", "yes"]


class Masking(Changing):
    """Edits in place what a tool returned in an earlier call."""

    def __init__(self, edit: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(self.change)
        self.edit = edit
        self.is_active = False

    def change(self, request: LlmRequest) -> None:
        """Edits the results in the request."""
        for content in request.contents if self.is_active else ():
            for part in content.parts or ():
                if part.function_response and part.function_response.response:
                    self.edit(part.function_response.response)


RESULT: dict[str, Any] = {"note": "notebooks " * 40, "data": {"rows": [{"id": 1}]}}


async def test_an_edited_payload_is_no_longer_what_the_summary_covers() -> None:
    """A result that changed after it was summarized comes back with its call."""
    masking = Masking(lambda value: value["data"]["rows"][0].update(id=2))
    llm = SimulatedLlm(script=[call("look"), "Found."])
    agent = {"tools": [queued_tool("look", [copy.deepcopy(RESULT)])]}
    chat = chats.guarded_chat(llm, SMALL, agent=agent, before=[masking])
    await chat.say("Look!")
    await seed(chat, user("The task."), original(500), state=NOW)
    await chat.say("Tidy up.")
    for is_edited in (False, True):
        masking.is_active = is_edited
        await chat.say("And now?")
        assert is_compacted(llm.requests[-1])
        parts = [p for c in llm.requests[-1].contents for p in c.parts or ()]
        assert any(part.function_response for part in parts) is is_edited

    assert llm.violations == 0


@pytest.mark.parametrize("is_rejected", [False, True], ids=["answered", "rejected"])
async def test_a_second_run_does_not_end_the_first_ones_bookkeeping(
    is_rejected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A call in flight keeps its record and its recovery while another run begins."""
    release = asyncio.Event()
    entered = asyncio.Event()

    async def reply(request: LlmRequest) -> Reply:
        if "Quick" in text_of(request.contents[-1]) or release.is_set():
            return "Fine."
        entered.set()
        await release.wait()
        if is_rejected:
            return RuntimeError("prompt is too long: 9000 tokens > 3000 maximum")
        return "At last."

    records: list[CallRecord] = []
    summaries = ["Short enough."] * 2
    llm = SimulatedLlm(script=reply, token_ratio=1.0, summary_replies=summaries)
    chat = guarded_chat(llm, guard={"on_call": records.append})
    await seed(chat, user("The task."), original(1_000), state=NOW)
    await chat.say("Quick.")
    await seed(chat, user("More."), original(2_400), state=EXACT)
    first = asyncio.create_task(chat.say("Take your time."))
    await asyncio.wait_for(entered.wait(), 5)
    assert answer_text(await chat.say("Quick.")) == "Fine."
    release.set()
    assert answer_text(await first) == ("Fine." if is_rejected else "At last.")
    assert "answered nothing" not in caplog.text
    assert [record.is_recovered for record in records] == [False, False, is_rejected]
    assert llm.summaries == 1 + is_rejected
    assert llm.requests[-1].text.count(SUMMARY_BEGINS) == 1


async def test_the_newest_messages_stay_beside_a_summary() -> None:
    """What "the second one" means stands there; with `keep=0` all is summarized."""
    for keep, is_kept in (0.1, True), (0, False):
        llm = SimulatedLlm(**TWENTY, summary_replies=["They talked."])
        strategy = Threshold(context_window=20_000, keep=keep)
        chat = chats.guarded_chat(llm, strategy)
        offered = "1. A red kite. 2. A green boat. 3. A blue tram."
        said = [user(words(17_000)), model(words(50)), user("Offer three.")]
        await seed(chat, *said, model(offered), state=EXACT)
        await chat.say("Change the second one.")
        contents = take_apart(llm.requests[-1].contents)
        assert text_of(contents[0]).startswith(SUMMARY_BEGINS)
        texts = [text_of(content) for content in contents[1:]]
        kept = [words(50), "Offer three.", offered, "Change the second one."]
        assert (texts == kept) is is_kept
        assert (len(texts) == 1) is not is_kept
        assert llm.rejections == llm.violations == 0


@pytest.mark.parametrize(
    ("answer_tokens", "has_tools", "is_kept"),
    [(2_000, False, True), (2_000, True, True), (4_500, False, False)],
)
async def test_the_last_answer_stays_beside_a_summary(
    answer_tokens: int, has_tools: bool, is_kept: bool
) -> None:
    """By default, although it takes more than a twentieth of the window."""
    llm = SimulatedLlm(**TWENTY, summary_replies=["They talked."])
    chat = chats.guarded_chat(llm, Threshold(context_window=20_000))
    answer = words(answer_tokens, "Three:")
    said = [user(words(14_000)), model("Yes."), user("Offer three."), model(answer)]
    if has_tools:
        said[1:2] = [builders.call("look", "c1"), response("look", "A kite.", "c1")]
    await seed(chat, *said, state=EXACT)
    await chat.say("Change the second one.")

    contents = take_apart(llm.requests[-1].contents)
    assert text_of(contents[0]).startswith(SUMMARY_BEGINS)
    texts = [text_of(content) for content in contents[1:]]
    assert (texts == [answer, "Change the second one."]) is is_kept
    assert (answer in texts) is is_kept
    assert llm.rejections == llm.violations == 0
