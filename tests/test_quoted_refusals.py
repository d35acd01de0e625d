"""What looks like a refusal of a history's form, or does not help, changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from google.adk.models.llm_request import LlmRequest

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm, call
from contextguard_adk.testing import SimulatedProviderError as ProviderError
from tests.builders import SUMMARY_BEGIN, Chat, guarded_agent, queued_tool
from tests.chats import (
    SUMMARY,
    Changing,
    agent_requests,
    guarded_chat,
    hide,
    words,
)
from tests.guarded import is_compacted

STRATEGY = Threshold(context_window=60_000)
REFUSALS = {
    "shape": "Conversation roles must alternate user/assistant.",
    "reasoning": "The reasoning_content is missing in an assistant message.",
    "thoughts": "messages.1.content.0: text cannot be thinking.",
}
each_refusal = pytest.mark.parametrize("said", REFUSALS.values(), ids=REFUSALS)
OVERFLOW = "prompt is too long: {} tokens > {} maximum"


async def say(chat: Chat, *texts: str) -> None:
    """Plays turns, which may end in an error."""
    for text in texts:
        with contextlib.suppress(ProviderError):
            await chat.say(text)


def open_chat(
    script: Sequence[Reply], is_guarded: bool = True
) -> tuple[Chat, SimulatedLlm]:
    """A chat, and its model, which does what the script says."""
    llm = SimulatedLlm(script=[*script], summary_replies=lambda _: "A summary.")
    guard = ContextGuardPlugin(default=STRATEGY)
    tools = [queued_tool("look", [*REFUSALS.values()])]
    return Chat(guarded_agent(llm, tools), [guard] if is_guarded else []), llm


@each_refusal
@pytest.mark.parametrize("is_result", [False, True])
async def test_words_that_the_conversation_holds_are_no_refusal(
    said: str, is_result: bool
) -> None:
    """The request is not sent again, and later ones leave as without a guard."""
    error = ProviderError(f"A guardrail failed for: {said}")
    calls = [call("look", step=number) for number in range(3)] if is_result else []
    script: list[Reply] = ["Hello.", *calls, error, "Go on."]
    asked = "Look." if is_result else f"My server says: {said} Why?"
    contents = []
    for is_guarded in (False, True):
        chat, llm = open_chat(script, is_guarded)
        await say(chat, "Hello.", asked, "Next.")
        assert llm.calls == len(script)
        contents.append(llm.requests[-1].contents)

    assert contents[0] == contents[1]


MASKED = "xyzzy-4711"


def hide_in_place(request: LlmRequest) -> None:
    """Masks the contents that the guard has put in."""
    for part in [part for each in request.contents for part in each.parts or ()]:
        part.text = part.text and part.text.replace(MASKED, "****")


@pytest.mark.parametrize(
    ("said", "change"),
    [
        (REFUSALS["shape"], hide_in_place),
        (REFUSALS["thoughts"], partial(hide, MASKED)),
        (OVERFLOW.format(61_000, 30_000), partial(hide, MASKED)),
    ],
)
async def test_what_others_have_masked_stays_masked_beside_a_summary(
    said: str, change: Callable[[LlmRequest], None]
) -> None:
    """The summary stands once in what is sent again."""
    errors = [ProviderError(said)]
    is_overflow = "too long" in said

    def answer(request: LlmRequest) -> Reply:
        text = request.model_dump_json()
        is_due = "request 6" in text if is_overflow else "A summary of" in text
        return errors.pop() if errors and is_due else "Go on."

    def summarize(request: LlmRequest) -> str:
        is_known = "the first task" in request.model_dump_json()
        return f"A summary of {'the first task' if is_known else 'something'}."

    llm = SimulatedLlm(script=answer, summary_replies=summarize)
    chat = guarded_chat(llm, STRATEGY, plugins=[Changing(change)])
    for number in range(9 if is_overflow else 6):
        task = f"request {number}: {'more' if number else 'the first task'}, {MASKED} "
        await say(chat, task + words(9_000 if is_overflow and number else 14_000))
        if number > 5:
            assert (await chat.state())[SUMMARY] == "A summary of the first task."
    assert not errors
    assert not any(MASKED in each.text for each in agent_requests(llm))
    shown = [each for each in agent_requests(llm) if is_compacted(each)]
    assert {each.text.count(SUMMARY_BEGIN) for each in shown} == {1}
    assert len(shown) > 1
    assert is_compacted(llm.requests[-1])
