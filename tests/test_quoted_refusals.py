"""What looks like a refusal of a history's form, or does not help, changes nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

import pytest

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm, call
from contextguard_adk.testing import SimulatedProviderError as ProviderError
from tests.builders import Chat, guarded_agent, queued_tool
from tests.chats import KEY, agent_requests, words

REFUSALS = {
    "shape": "Conversation roles must alternate user/assistant.",
    "reasoning": "The reasoning_content is missing in an assistant message.",
    "thoughts": "messages.1.content.0: text cannot be thinking.",
}

each_refusal = pytest.mark.parametrize("said", REFUSALS.values(), ids=REFUSALS)


class WrongRequestError(ProviderError):
    """A request that the provider refuses."""

    status_code = 400


class WrongKeyError(ProviderError):
    """A key that the provider does not know."""

    status_code = 401


async def say(chat: Chat, text: str) -> None:
    """Plays a turn, which may end in an error."""
    with contextlib.suppress(ProviderError):
        await chat.say(text)


def open_chat(
    script: Sequence[Reply], is_guarded: bool = True
) -> tuple[Chat, SimulatedLlm]:
    """A chat, and its model, which does what the script says."""
    llm = SimulatedLlm(script=[*script], summary_replies=lambda _: "A summary.")
    guard = ContextGuardPlugin(default=Threshold(context_window=60_000))
    tools = [queued_tool("look", [*REFUSALS.values()])]
    return Chat(guarded_agent(llm, tools), [guard] if is_guarded else []), llm


@each_refusal
@pytest.mark.parametrize("is_result", [False, True])
async def test_words_that_the_conversation_holds_are_no_refusal(
    said: str, is_result: bool
) -> None:
    """The request is not sent again, and later ones leave as without a guard."""
    error = WrongRequestError(f"A guardrail failed for: {said}")
    calls = [call("look", step=number) for number in range(3)] if is_result else []
    script: list[Reply] = ["Hello.", *calls, error, "Go on."]
    asked = "Look." if is_result else f"My server says: {said} Why?"

    contents = []
    for is_guarded in (False, True):
        chat, llm = open_chat(script, is_guarded)
        for text in ("Hello.", asked, "Next."):
            await say(chat, text)
        assert llm.calls == len(script)
        contents.append(llm.requests[-1].contents)
    assert contents[0] == contents[1]


@each_refusal
async def test_what_did_not_help_within_a_recovery_is_not_kept(said: str) -> None:
    """The session's record says nothing of it."""
    overflow = WrongRequestError("prompt is too long: 9000 tokens > 7000 maximum")
    errors = [overflow, WrongRequestError(said), WrongKeyError("The key has expired.")]
    before = [f"Answer {number}." for number in range(6)]
    chat, llm = open_chat([*before, *errors, "Go on."])
    for number in range(6):
        await say(chat, f"{number} " + words(900))

    await say(chat, "Look.")
    assert len(agent_requests(llm)) == len(before) + len(errors)
    await say(chat, "Next.")

    record = json.loads((await chat.state())[KEY.format("record")])
    assert not record.get("helped")
