"""What is sent begins with a user's message and holds no result without its call."""

from __future__ import annotations

from typing import Any

import pytest
from google.adk.agents.run_config import RunConfig
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from contextguard_adk import (
    MessageWindow,
    Pipeline,
    SlidingWindow,
    Strategy,
    Threshold,
    TokenWindow,
)
from contextguard_adk._history.rendering import mend_contents
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
from tests.chats import Changing, guarded_chat, seed, summary_requests, text_of
from tests.talks import WINDOW, acting, looking_tool, message, summarizing_llm

BEGINNING = "[System: Earlier messages, if there are any, are not shown.]"
SHORT = MessageWindow(
    window_size=4, min_messages_before_windowing=6, preserve_initial_task=False
)
STRATEGIES: dict[str, Strategy] = {
    "threshold": Threshold(context_window=WINDOW),
    "threshold, low": Threshold(context_window=1_500),
    "sliding": SlidingWindow(context_window=WINDOW, max_messages=6),
    "pipeline": Pipeline(context_window=WINDOW),
    "pipeline, messages": Pipeline(context_window=1_500, window=SHORT),
    "pipeline, tokens": Pipeline(
        context_window=1_500, window=TokenWindow(budget_tokens=500)
    ),
    "below": Threshold(context_window=100_000),
}


def newest(count: int) -> RunConfig:
    """Loads the newest events of a session alone."""
    return RunConfig(get_session_config=GetSessionConfig(num_recent_events=count))


@pytest.mark.parametrize("count", [1, 5, 10])
@pytest.mark.parametrize("name", STRATEGIES)
async def test_no_turn_is_lost_wherever_the_history_begins(
    name: str, count: int
) -> None:
    """Sixteen turns, each with a tool, of a session that is loaded in part."""
    strategy = STRATEGIES[name]
    llm = summarizing_llm(acting(), context_window=strategy.context_window)
    tools = {"tools": [looking_tool()]}
    chat = guarded_chat(llm, strategy, agent=tools, run_config=newest(count))
    for number in range(16):
        assert answer_text(await chat.say(message(number)))
    assert (llm.rejections, llm.violations) == (0, 0)
    # It is no part of the history.
    assert not any(BEGINNING in request.text for request in summary_requests(llm))


async def test_a_resend_begins_so_too() -> None:
    """The provider's window is smaller than the one that is configured."""
    llm = summarizing_llm(acting(), context_window=1_000)
    tools = {"tools": [looking_tool()]}
    chat = guarded_chat(llm, STRATEGIES["below"], agent=tools, run_config=newest(9))
    for number in range(16):
        assert answer_text(await chat.say(message(number)))
    assert llm.rejections >= 1
    assert llm.violations == 0


@pytest.mark.parametrize("observe", [False, True], ids=["guarding", "observing"])
async def test_the_notice_stands_first(observe: bool) -> None:
    """It is the same in every request, what follows is untouched; an observer adds
    nothing."""
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


async def test_a_lone_result_is_told() -> None:
    """Where another plugin has left a result without its call, it becomes a text."""

    def drop_calls(request: LlmRequest) -> None:
        kept = [c for c in request.contents if not any(map(is_call, c.parts or ()))]
        request.contents = kept

    llm = SimulatedLlm(script=[call_part("look", step=1), "Done."] * 3)
    agent = {"tools": [looking_tool()]}
    chat = guarded_chat(llm, agent=agent, before=[Changing(drop_calls)])
    for number in range(3):
        assert answer_text(await chat.say(message(number))) == "Done."
        said = "".join(map(text_of, llm.requests[-1].contents))
        assert said.count("[System: Result of the tool 'look', whose") == number + 1
        assert "mark-result-001!" in said
    assert (llm.rejections, llm.violations) == (0, 0)


def is_call(part: types.Part) -> bool:
    """Whether a part calls a tool."""
    return part.function_call is not None


FILE = types.FunctionResponsePart(
    inline_data=types.FunctionResponseBlob(mime_type="image/png", data=b"png")
)


def lone(name: str, *files: types.FunctionResponsePart) -> types.Part:
    """A result that answers nothing."""
    part = response_part(name, {"found": 7}, "elsewhere")
    assert part.function_response
    part.function_response.parts = [*files] or None
    return part


def told(name: str, *files: types.Part) -> types.Content:
    """What is said of it."""
    head = f"[System: Result of the tool {name!r}, whose call is not shown]"
    text = types.Part(text=f'{head}\n{{"found":7}}')
    return types.Content(role="user", parts=[text, *files])


PAIR = [call("look", "a"), response("look", "ok", "a")]
IMAGE = types.Part(inline_data=types.Blob(mime_type="image/png", data=b"png"))


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([user("a"), model("b"), user("c")], None, id="texts"),
        pytest.param([user("a"), *PAIR, model("b")], None, id="a pair"),
        pytest.param(
            [user("a"), calls(call_part("x"), call_part("y")), responses(
                response_part("y"), response_part("x"))],
            None,
            id="parallel calls",
        ),
        pytest.param([model("b")], [user(BEGINNING), model("b")], id="a model"),
        pytest.param(PAIR, [user(BEGINNING), *PAIR], id="a call"),
        pytest.param(
            [responses(lone("look", FILE)), model("b")],
            [told("look", IMAGE), model("b")],
            id="a result",
        ),
        pytest.param(
            [user("a"), PAIR[0], responses(*(PAIR[1].parts or ()), lone("read"))],
            [user("a"), *PAIR, told("read")],
            id="a result beside another one",
        ),
    ],
)  # fmt: skip
def test_only_what_is_wrong_is_changed(
    contents: list[types.Content], expected: Any
) -> None:
    """What is in order comes back as it was, the very same list."""
    mended = mend_contents(contents)
    if expected is None:
        assert mended is contents
    else:
        assert mended == expected
