"""What the strategies that ship with the package keep, shorten, drop and summarize."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from pydantic import ValidationError

from contextguard_adk import CompactionRecord, Pipeline, SlidingWindow, Threshold
from contextguard_adk.errors import ConfigError
from contextguard_adk.strategies import (
    MessageWindow,
    Reducer,
    Strategy,
    SummaryCompaction,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.testing import SimulatedLlm
from tests.builders import (
    KeptSessions,
    RequestTap,
    call,
    model,
    play,
    response,
    user,
)
from tests.chats import (
    DEMAND,
    EXACT,
    Changing,
    agent_requests,
    guarded_chat,
    seed,
    summary_requests,
    take_apart,
    text_of,
    without_head,
    words,
)
from tests.judging import (
    check_answers,
    check_live_requests,
    check_pauses,
    check_provider,
)
from tests.scenarios import (
    write_conversation,
)


@dataclass
class Outcome:
    """What became of a history: the contents that were sent, and what it took."""

    llm: SimulatedLlm
    contents: Sequence[types.Content]
    told: list[CompactionRecord]

    @property
    def tokens(self) -> int:
        """What the request took."""
        return agent_requests(self.llm)[-1].prompt_tokens

    @property
    def kept(self) -> list[types.Content]:
        """What stands beside the summary in it."""
        return without_head(self.contents)

    @property
    def names(self) -> list[str]:
        """The first words of that."""
        return [(text_of(content).split() or [""])[0] for content in self.kept]


def skip_model(**_: Any) -> LlmResponse:
    """Answers in place of a model that would refuse a request for its form."""
    return LlmResponse(content=model("Done."))


async def send(
    strategy: Strategy,
    contents: Sequence[types.Content],
    *,
    state: dict[str, Any] | None = None,
    reply: Any = "Short enough.",
    change: Callable[[LlmRequest], None] = lambda _: None,
    **agent: Any,
) -> Outcome:
    """Says the last of these contents in a session that has the others."""
    llm = SimulatedLlm(
        context_window=10_000_000, token_ratio=1.0, summary_replies=lambda _: reply
    )
    tap = RequestTap()
    told = list[CompactionRecord]()
    surround: Any = {"before": [Changing(change)], "plugins": [tap]}
    guard = {"on_compaction": told.append}
    chat = guarded_chat(llm, strategy, guard=guard, agent=agent, **surround)

    *earlier, last = contents
    await seed(chat, *earlier, state=EXACT | (state or {}))
    await chat.say(last)
    assert llm.violations == 0
    return Outcome(llm, tap.contents[-1], told)


def small_talk(count: int, size_tokens: int = 1) -> list[types.Content]:
    """Alternating messages, the last of them the user's."""
    return [
        (user if (count - number) % 2 else model)(words(size_tokens, f"m{number}"))
        for number in range(count)
    ]


def tool_talk(count: int, size_chars: int) -> list[types.Content]:
    """So many calls with results of so many characters, and a question."""
    contents = [user("Task.")]
    for number in range(count):
        result = f"{number} {'notebooks ' * size_chars}"[:size_chars]
        contents += [call("read", str(number)), response("read", result, str(number))]
    return [*contents, user("Now?")]


def instruction(text: str) -> types.Content:
    """A history content that is neither the user's nor the model's."""
    return types.Content(role="system", parts=[types.Part(text=text)])


def test_settings_have_other_names() -> None:
    """Either may be given and read, but given once."""
    settings = SlidingWindow.model_validate({"max_turns": 9, "max_tokens": 32_000})
    assert settings == SlidingWindow(max_messages=9, context_window=32_000)
    assert (settings.max_turns, settings.max_tokens) == (9, 32_000)
    with pytest.raises(ValidationError, match="give one"):
        SlidingWindow.model_validate({"max_turns": 9, "max_messages": 9})


@pytest.mark.parametrize(
    ("kind", "settings", "complaint"),
    [
        (SlidingWindow, {"context_window": 999}, "1000"),
        (SlidingWindow, {"contextwindow": 8_000}, "Did you mean .context_window."),
        (SlidingWindow, {"max_compaction_attempts": 11}, "10"),
        (SlidingWindow, {"summarizer": 7}, "BaseLlm"),
        (SlidingWindow, {"max_messages": 3}, "4"),
        (SlidingWindow, {"trigger": 999}, "a part of the window"),
        (
            ToolOutputTruncation,
            {"smart_truncate": True, "max_length": 3_999},
            "4000",
        ),
        (ToolOutputTruncation, {"max_length": 0}, "max_length"),
        (SummaryCompaction, {"trigger_threshold": 0.5}, "must be larger"),
        (TokenWindow, {"budget_tokens": 99}, "at least 100"),
    ],
)
def test_bad_settings_are_refused(
    kind: type[Strategy] | type[Reducer], settings: dict[str, Any], complaint: str
) -> None:
    """A mistake is an error at start that names the setting and its bound."""
    with pytest.raises(ConfigError, match=complaint) as caught:
        kind(**settings)
    if kind is SlidingWindow:
        assert next(iter(settings)) in str(caught.value)


@pytest.mark.parametrize(
    ("fixed_tokens", "reply", "budgets"),
    [
        (1_780, "fact 4711. " * 1_000, [203, 101, 50]),
        (1_700, RuntimeError("down"), [215]),
    ],
    ids=["over the threshold", "down"],
)
async def test_more_summaries_only_where_they_help(
    fixed_tokens: int, reply: Any, budgets: list[int]
) -> None:
    """Each further attempt asks for half the length; else the request is shortened."""
    # The live request and the fixed part leave no room for a summary of 100.
    contents = [*small_talk(4, 300)[:-1], user(words(1_300, "live"))]
    sizes: Any = {"context_window": 4_000, "summarizer_context_window": 100_000}
    strategy = Threshold(user_messages=0, **sizes)
    done = await send(
        strategy, contents, reply=reply, instruction=words(fixed_tokens - 20)
    )
    asked = [r.config.max_output_tokens for r in summary_requests(done.llm)]
    assert asked == budgets

    (record,) = done.told
    assert record.attempts == len(budgets)
    assert record.is_mechanical is isinstance(reply, Exception)
    assert record.tokens_after <= 3_200


@pytest.mark.parametrize(
    ("window", "max_messages", "contents", "kept_count"),
    [
        pytest.param(100_000, 21, small_talk(21, 60), 21, id="not too many"),
        pytest.param(100_000, 20, small_talk(41, 60), 13, id="30 percent"),
        pytest.param(4_000, 40, small_talk(21, 450), 3, id="too large"),
        pytest.param(4_000, 30, small_talk(31, 100), 9, id="only turns ran out"),
        pytest.param(
            4_000, 40, [*small_talk(9, 1_500), user("live")], 0, id="not even 3 fit"
        ),
    ],
)
async def test_sliding_window_keeps_what_leaves_room(
    window: int, max_messages: int, contents: list[types.Content], kept_count: int
) -> None:
    """With more contents than `max_messages` 30 % of them stay word for word."""
    sizes: Any = {"context_window": window, "summarizer_context_window": 100_000}
    done = await send(SlidingWindow(max_messages=max_messages, **sizes), contents)
    assert done.llm.summaries == len(done.told) == (kept_count < len(contents))
    if not kept_count:
        assert "`live`" in text_of(take_apart(done.contents)[1])
    assert len(done.kept) == pytest.approx(kept_count, abs=kept_count and 1)
    assert done.kept == contents[len(contents) - len(done.kept) :]
    assert done.tokens <= 0.8 * window


LARGE: dict[str, Any] = {"context_window": 20_000}
ALONE: dict[str, Any] = {"tool_output": None, "summary": None}
DEEP: dict[str, Any] = {"window": TokenWindow(budget_tokens=0.22)}
BARE: dict[str, Any] = {"window": None, "tool_output": None}
FITS = range(15_999)


@pytest.mark.quick("default", "too few messages", "last tool result")
@pytest.mark.parametrize(
    ("settings", "contents", "summaries", "sizes"),
    [
        ({"user_messages": 0, **DEEP}, small_talk(100, 180), 0, range(4_000, 5_000)),
        (DEEP, small_talk(100, 180), 0, range(6_000, 8_400)),
        ({"user_messages": 0}, small_talk(100, 180), 0, range(4_500, 5_500)),
        ({"window": MessageWindow()}, small_talk(49, 340), 1, FITS),
        (BARE, small_talk(100, 190), 1, FITS),
        ({"summary": None, **BARE}, small_talk(100, 180), 1, FITS),
        ({}, small_talk(19, 900), 0, FITS),
        ({"window": None, "summary": None}, tool_talk(1, 68_000), 0, FITS),
        ({"window": TokenWindow(budget_tokens=19_800)}, small_talk(45, 380), 1, FITS),
    ],
    ids=[
        "deep", "beside the user's words", "default", "too few messages",
        "above the trigger", "no steps", "minima", "last tool result", "large budget",
    ],
)  # fmt: skip
async def test_no_preference_keeps_a_request_too_large(
    settings: dict[str, Any],
    contents: list[types.Content],
    summaries: int,
    sizes: range,
) -> None:
    """What leaves is below the threshold, and a summary is paid for once at most."""
    done = await send(Pipeline(**LARGE, **settings), contents)
    assert (len(done.told), done.llm.summaries) == (1, summaries)
    assert done.tokens in sizes


@pytest.mark.quick("True-0-0.05")
@pytest.mark.parametrize(
    ("uses_tools", "least_ratio", "most_ratio"), [(False, 0.2, 0.25), (True, 0, 0.05)]
)
async def test_a_chat_keeps_more_of_the_newest_messages(
    uses_tools: bool, least_ratio: float, most_ratio: float
) -> None:
    """At the first and at each later compaction; one call is enough to end a chat."""
    window = 8_000
    llm = SimulatedLlm(context_window=window, token_ratio=1.0)
    tap = RequestTap()
    told = list[CompactionRecord]()
    strategy = Pipeline(context_window=window, user_messages=0)
    chat = guarded_chat(
        llm, strategy, guard={"on_compaction": told.append}, plugins=[tap]
    )
    if uses_tools:
        await seed(chat, user("Look."), call("look", "c1"), response("look", "x", "c1"))
    kept_tokens = []
    for number in range(90):
        compactions_before = len(told)
        await chat.say(words(150, f"m{number}"))
        if len(told) > compactions_before:
            kept = without_head(tap.contents[-1])
            kept_tokens.append(sum(len(text_of(content)) for content in kept) // 4)

    assert len(kept_tokens) >= 2
    for tokens in kept_tokens:
        assert least_ratio * window <= tokens <= most_ratio * window


async def test_a_summary_starts_from_the_originals() -> None:
    """What was shortened or dropped before is shown to the summarizer whole."""
    contents = tool_talk(30, 4_500)
    contents[2] = response("read", "y" * 3_000 + " the needle " + "y" * 1_500, "0")
    steps: Any = {"window": MessageWindow(), "tool_output": ToolOutputTruncation()}
    sizes: Any = {"context_window": 10_000, "summarizer_context_window": 1_000_000}
    done = await send(Pipeline(**sizes, **steps), contents)
    assert any("the needle" in request.text for request in summary_requests(done.llm))


TALK = [user("Task."), instruction("Rule."), *small_talk(60, 60)]


@pytest.mark.parametrize(
    ("window", "contents", "kept"),
    [
        (
            {"window_size": 9},
            small_talk(51, 60),
            ["m0", *(f"m{n}" for n in range(43, 51))],
        ),
        ({"window_size": 5}, TALK, ["Task.", "Rule.", "m57", "m58", "m59"]),
        (
            {"window_size": 5, "preserve_system": False},
            TALK,
            ["Task.", "m56", "m57", "m58", "m59"],
        ),
    ],
    ids=["newest", "preserved", "no system"],
)
async def test_what_a_message_window_keeps(
    window: dict[str, Any], contents: list[types.Content], kept: list[str]
) -> None:
    """The newest, the first task and instructions."""
    strategy = Pipeline(window=MessageWindow(**window), **ALONE, **LARGE)
    done = await send(
        strategy, contents, state=DEMAND, before_model_callback=skip_model
    )
    assert done.names == kept


@pytest.mark.parametrize("name", ["kubernetes", "empty results"])
async def test_a_pipeline_keeps_a_conversation_inside_the_window(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No request is refused, no pair broken, no answer lost."""
    caplog.set_level(logging.ERROR, "contextguard_adk")
    conversation = write_conversation(name, 4_000)
    llm = SimulatedLlm(
        context_window=4_000,
        token_ratio=conversation.token_ratio,
        media_tokens=conversation.media_tokens,
        usage=conversation.usage,
    )
    strategy = Pipeline(context_window=4_000)
    sessions = KeptSessions()

    played = await play(conversation, strategy, llm, session_service=sessions)
    check_provider(name, played)
    assert not caplog.records
    check_answers(name, played, [turn.answer for turn in conversation.turns])
    check_live_requests(name, played.calls)
    check_pauses(name, played.calls, 4_000)
    assert any(each.is_compacted for each in played.calls)
