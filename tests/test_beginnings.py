"""What is sent begins with a user's message and holds no result without its call."""

from __future__ import annotations

import pytest
from google.adk.agents.run_config import RunConfig
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from contextguard_adk import Pipeline, SlidingWindow, Threshold
from contextguard_adk.strategies import MessageWindow, Strategy, TokenWindow
from contextguard_adk.testing import SimulatedLlm
from tests.builders import (
    RequestTap,
    answer_text,
    call,
    call_part,
    calls,
    model,
    response,
    response_part,
    responses,
    user,
)
from tests.chats import Changing, guarded_chat, seed, summary_requests
from tests.talks import WINDOW, acting, looking_tool, message, summarizing_llm

BEGINNING = "[System: Earlier messages, if there are any, are not shown.]"
SHORT = MessageWindow(
    window_size=4, min_messages_before_windowing=6, preserve_initial_task=False
)
TOKENS = TokenWindow(budget_tokens=500)
CASES: dict[str, tuple[Strategy, int | None]] = {
    "threshold": (Threshold(context_window=WINDOW), None),
    "sliding": (SlidingWindow(context_window=WINDOW, max_messages=6), None),
    "pipeline, messages": (Pipeline(context_window=1_500, window=SHORT), None),
    "pipeline, tokens": (Pipeline(context_window=1_500, window=TOKENS), None),
    "resend": (Threshold(context_window=100_000), 1_000),
}
"""Strategies, and the provider's window where it is smaller than the configured one."""


LONG = ("threshold", "pipeline, tokens", "resend")


@pytest.mark.quick("threshold-1", "pipeline, tokens-1", "threshold-10")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 1) for name in CASES),
        *((name, 10) for name in LONG),
        *(
            pytest.param(name, 10, marks=pytest.mark.slow)
            for name in CASES
            if name not in LONG
        ),
    ],
)
async def test_no_turn_is_lost_wherever_the_history_begins(
    name: str, count: int
) -> None:
    """Turns, each with a tool, of a session of which the newest events are loaded."""
    strategy, window = CASES[name]
    llm = summarizing_llm(acting(), context_window=window or strategy.context_window)
    newest = RunConfig(get_session_config=GetSessionConfig(num_recent_events=count))
    agent = {"tools": [looking_tool()]}
    chat = guarded_chat(llm, strategy, agent=agent, run_config=newest)
    for number in range(8):
        assert answer_text(await chat.say(message(number)))

    # ADK 2.0 loads all events, whatever a run asks for.
    assert llm.rejections <= (name == "resend")
    assert llm.rejections or name != "resend" or count == 1
    assert llm.violations == 0
    # It is no part of the history.
    assert not any(BEGINNING in request.text for request in summary_requests(llm))


@pytest.mark.parametrize("observe", [False, True], ids=["guarding", "observing"])
async def test_the_notice_stands_first(observe: bool) -> None:
    """It is the same in every request, what follows is untouched."""
    tap = RequestTap()
    llm = SimulatedLlm(script=[call_part("look", step=1), "Done."])
    agent = {"tools": [looking_tool()]}
    guard = {"observe": observe}
    chat = guarded_chat(llm, guard=guard, agent=agent, before=[tap])
    await seed(chat, model("Good morning."))
    if observe:
        with pytest.raises(Exception, match="first message must use"):
            await chat.say("Go on.")
    else:
        assert answer_text(await chat.say("Go on.")) == "Done."
    first = [] if observe else [user(BEGINNING)]
    for request, came in zip(llm.requests, tap.contents, strict=True):
        assert request.contents == [*first, *came]


PNG = {"mime_type": "image/png", "data": b"png"}


def lone(name: str) -> types.Part:
    """A result, with a file, that answers nothing."""
    result = {"name": name, "id": "elsewhere", "response": {"found": 7}}
    return types.Part.model_validate(
        {"function_response": {**result, "parts": [{"inline_data": PNG}]}}
    )


def told(name: str) -> types.Content:
    """What is said of it."""
    head = f"[System: Result of the tool {name!r}, whose call is not shown]"
    image = types.Part.model_validate({"inline_data": PNG})
    return responses(types.Part(text=f'{head}\n{{"found":7}}'), image)


PAIR = [call("look", "a"), response("look", "ok", "a")]
SWAPPED = responses(response_part("y"), response_part("x"))
PARALLEL = [user("a"), calls(call_part("x"), call_part("y")), SWAPPED]
BESIDE = responses(*(PAIR[1].parts or ()), lone("read"))


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ([user("a"), *PAIR, model("b")], [user("a"), *PAIR, model("b")]),
        (PARALLEL, PARALLEL),
        ([model("b")], [user(BEGINNING), model("b")]),
        (PAIR, [user(BEGINNING), *PAIR]),
        ([responses(lone("look")), model("b")], [told("look"), model("b")]),
        ([user("a"), PAIR[0], BESIDE], [user("a"), *PAIR, told("read")]),
    ],
    ids=["pair", "parallel", "model", "call", "result", "result-beside-another"],
)
async def test_only_what_is_wrong_is_changed(
    contents: list[types.Content], expected: list[types.Content]
) -> None:
    """Where another plugin has left a result without its call, it becomes a text."""

    def put(request: LlmRequest) -> None:
        request.contents = [*contents, user("Go on.")]

    llm = SimulatedLlm(script=["Done."])
    chat = guarded_chat(llm, before=[Changing(put)])
    assert answer_text(await chat.say("Go on.")) == "Done."
    assert llm.requests[-1].contents == [*expected, user("Go on.")]
    assert llm.violations == 0
