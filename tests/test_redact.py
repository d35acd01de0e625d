"""What the user's own `redact` keeps from leaving a conversation."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.artifacts import InMemoryArtifactService
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk import CompactionRecord, ContextGuardPlugin, Threshold, TodosTool
from contextguard_adk.testing import Reply, SimulatedLlm, call
from contextguard_adk.testing import SimulatedProviderError as ProviderError
from tests.builders import Chat, answer_text, model, user
from tests.chats import (
    agent_requests,
    seed,
    summary_requests,
    take_apart,
    text_of,
    words,
)
from tests.guarded import NOW, guarded_chat, is_compacted

WINDOW = 4_000
CARD = re.compile(r"4111-?1111-?1111-?1111")
SECRET = "4111-1111-1111-1111"
NUMBER = 4111111111111111


def redact(text: str) -> str:
    """Replaces card numbers."""
    return CARD.sub("[card]", text)


def counting_llm() -> SimulatedLlm:
    """A model that counts as the heuristic does."""
    return SimulatedLlm(context_window=WINDOW, token_ratio=1.0)


def pay(card: str) -> dict[str, Any]:
    """Pays by card."""
    said = words(200, f"receipt {SECRET}")
    return {"card": NUMBER, SECRET: "paid", "text": f"{said} {card}"}


def script(llm: SimulatedLlm, *replies: Reply) -> None:
    """Has a model say these next."""
    left = iter(replies)
    llm.script = lambda _: next(left)


async def paying(llm: SimulatedLlm, **guard: Any) -> Chat:
    """A chat in which a card number stands in each kind of part, then a compaction."""
    todo = {"title": f"Charge {SECRET}", "status": "pending"}
    calls = call("todos", todos=[todo]), call("pay", card=SECRET)
    script(llm, *calls, f"I have charged {SECRET}.", "Done.")
    chat = guarded_chat(
        llm,
        Threshold(context_window=WINDOW, keep=0, preview_tokens=100),
        guard={"redact": redact, "summary_artifacts": True, **guard},
        tools=[pay, TodosTool()],
    )
    chat.runner.artifact_service = InMemoryArtifactService()
    await seed(chat, user(f"My card is {SECRET}. {words(300)}"), model(words(2_000)))
    await chat.say(f"Never charge {SECRET} twice! Charge it now.")
    await chat.set_state(NOW)
    await chat.say("Go on.")
    return chat


def stored(state: dict[str, Any]) -> str:
    """What the guard has stored, but for the todos, which the agent has written."""
    own = {k: v for k, v in state.items() if "guard" in k and "todos" not in k}
    return json.dumps(own)


@pytest.mark.parametrize("is_down", [False, True], ids=["summary", "excerpts"])
async def test_nothing_of_it_leaves(
    is_down: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """To the summarizer, session state, artifacts, what recall reads, or a log."""
    caplog.set_level(logging.DEBUG, "contextguard_adk")
    failure = ProviderError(f"cannot read {SECRET}")
    llm = counting_llm()
    llm.summary_replies = [failure] * 4 if is_down else [f"They paid by {SECRET}."]
    chat = await paying(llm)
    assert summary_requests(llm)
    assert not [r for r in summary_requests(llm) if CARD.search(r.text)]

    state = await chat.state()
    assert "[card]" in stored(state)
    assert not CARD.search(stored(state))

    head = agent_requests(llm)[-1]
    assert is_compacted(head)
    said = text_of(take_apart(head.contents)[0])
    assert "My card is [card]." in said
    assert not CARD.search(said)

    key: Any = {"app_name": "app", "user_id": "user", "session_id": "session"}
    saved = chat.runner.artifact_service
    assert saved
    (name,) = await saved.list_artifact_keys(**key)
    part = await saved.load_artifact(**key, filename=name)
    assert part
    assert part.inline_data
    assert not CARD.search((part.inline_data.data or b"").decode())
    assert "[card]" in (part.inline_data.data or b"").decode()
    assert not CARD.search(caplog.text)


async def test_recall_reads_what_is_left() -> None:
    """By words, and under a handle."""
    llm = counting_llm()
    chat = await paying(llm)
    script(llm, call("recall_history", query="receipt"), "Done.")
    await chat.say("What was paid?")
    searched = last_result(llm)
    assert "receipt [card]" in searched

    (handle, *_) = re.findall(r"\[([0-9a-f]{10}) pay result", searched)
    script(llm, call("recall_history", item=handle), "Done.")
    await chat.say("Read it.")
    assert "receipt [card]" in last_result(llm)
    assert not CARD.search(searched + last_result(llm))


def last_result(llm: SimulatedLlm) -> str:
    """The newest result of a tool that the agent was sent."""
    parts = [p for c in agent_requests(llm)[-1].contents for p in c.parts or ()]
    return str([p.function_response for p in parts if p.function_response][-1].response)


async def test_the_agents_own_messages_stay_as_they_are() -> None:
    """What its model is sent of them is for its own callbacks to change."""
    llm = counting_llm()
    await paying(llm)
    first = agent_requests(llm)[0]
    assert first.text.count(SECRET) == 2


def failing(text: str) -> str:
    """Fails."""
    raise ValueError(text)


@pytest.mark.parametrize("function", [failing, lambda _: None, lambda _: b"text"])
async def test_what_cannot_be_redacted_does_not_leave(
    function: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The turn goes on, nothing is paid for or stored; the next one compacts."""
    caplog.set_level(logging.DEBUG, "contextguard_adk")
    functions = [function]
    llm = counting_llm()
    compactions = list[CompactionRecord]()
    chat = await paying(
        llm,
        redact=lambda text: functions[0](text),
        on_compaction=compactions.append,
    )

    assert answer_text(await chat.events()) == "Done."
    assert not summary_requests(llm)
    assert not compactions
    assert not CARD.search(caplog.text)

    functions[0] = redact
    script(llm, "Done again.")
    await chat.say("Go on.")
    assert len(compactions) == 1
    assert not [r for r in summary_requests(llm) if CARD.search(r.text)]
    assert "[card]" in stored(await chat.state())


async def test_names_of_files_are_texts() -> None:
    """Of messages and of results."""
    llm = counting_llm()
    name = f"card {SECRET}.png"
    blob = types.Blob(data=b"..", mime_type="image/png", display_name=name)
    file = types.FileData(file_uri=f"gs://b/{SECRET}", mime_type="image/png")
    parts = [types.Part(inline_data=blob), types.Part(file_data=file)]
    chat = guarded_chat(llm, guard={"redact": redact})
    await seed(chat, types.UserContent(parts), model(words(2_000)), state=NOW)
    await chat.say("Go on.")
    (asked,) = summary_requests(llm)

    assert "card [card].png" in asked.text
    assert not CARD.search(asked.text)


@pytest.mark.parametrize("wrong", ["callbacks", 5])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    """At the start, by its type."""
    with pytest.raises(
        TypeError, match=r"redact must be a sync function .* not (str|int): "
    ):
        ContextGuardPlugin(redact=wrong)


class Later:
    """Would have to be awaited."""

    async def __call__(self, text: str) -> str:
        """Returns the text."""
        return text


@pytest.mark.parametrize("later", [Later(), Later().__call__])
def test_an_async_function_is_refused(later: Any) -> None:
    """Texts are changed where nothing can be awaited."""
    with pytest.raises(
        TypeError, match=r"a sync function of one argument, a text, not async "
    ):
        ContextGuardPlugin(redact=later)


def mask(callback_context: CallbackContext, llm_request: LlmRequest) -> None:
    """Changes what the agent's model is sent."""


@pytest.mark.parametrize("is_redacted", [False, True])
async def test_masks_of_callbacks_are_told_of(
    is_redacted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, at the first run, unless there is a `redact`."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    llm = SimulatedLlm()
    child = LlmAgent(name="masked", model=llm, before_model_callback=mask)
    guard = {"redact": redact} if is_redacted else {}
    chat = guarded_chat(llm, guard=guard, sub_agents=[child])
    await chat.say("Hello.")
    await chat.say("Hello.")
    told = [r.message for r in caplog.records if "before_model_callback" in r.message]

    assert len(told) == (not is_redacted)
    assert all("of masked changes" in each for each in told)
