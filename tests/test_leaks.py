"""Nothing of a conversation stays in memory once its run has ended."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import pytest
from google.adk.models.llm_request import LlmRequest

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk._runtime import runs
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import Chat, answer_text, guarded_agent, model, queued_tool, user
from tests.chats import DEMAND, SUMMARY, seed, words
from tests.guarded import SMALL
from tests.holding import holds

SAID = "what-the-model-said"
SUMMED_UP = "what-the-summary-says"


pytestmark = pytest.mark.usefixtures("young_heap")


class Talk:
    """A conversation that is compacted with its first message."""

    def __init__(self, strategy: Strategy = SMALL, has_tools: bool = False) -> None:
        self.reply: Reply | None = "Done."
        self.was_asked = asyncio.Event()
        summary = f"A summary: {SUMMED_UP}."
        self.llm = SimulatedLlm(
            context_window=100_000, script=self._answer, summary_replies=[summary] * 9
        )
        self.plugin = ContextGuardPlugin(default=strategy)
        tools = [queued_tool("look", [])] if has_tools else []
        self.chat = Chat(guarded_agent(self.llm, tools), [self.plugin])

    async def _answer(self, request: LlmRequest) -> Reply:
        self.was_asked.set()
        if self.reply is None:
            await asyncio.Event().wait()
        assert self.reply is not None
        return self.reply

    async def say(self, tokens: int = 2_500, said: str = SAID) -> None:
        """Puts a history into the session, and has a turn that compacts it."""
        await seed(self.chat, user("Do it."), model(words(tokens, said)), state=DEMAND)
        assert answer_text(await self.chat.say("Go on.")) == "Done."

    async def break_off(self, is_cancelled: bool = True) -> None:
        """Says something; the run fails, or is cancelled while the model works."""
        self.reply = None if is_cancelled else ConnectionError("reset")
        self.was_asked.clear()
        turn = asyncio.create_task(self.chat.say("Go on."))
        await asyncio.wait_for(self.was_asked.wait(), 5)
        if is_cancelled:
            turn.cancel()
        with suppress(ConnectionError, asyncio.CancelledError):
            await turn
        for _ in range(10):  # ADK's own tasks end a little later.
            await asyncio.sleep(0)
        self.reply = "Done."


async def test_nothing_stays_of_a_run_that_has_ended() -> None:
    """Contents and summary are the session's alone, and go with that; no later turn
    that is cancelled takes the summary back."""
    talk = Talk()
    await talk.say()
    assert SUMMED_UP in (await talk.chat.state())[SUMMARY]
    for is_broken_off in (False, True):
        if is_broken_off:
            await talk.break_off()
        assert not holds(talk.plugin, SAID)
        assert not holds(talk.plugin, SUMMED_UP)


@pytest.mark.parametrize("has_recall", [False, True])
async def test_nothing_stays_of_a_run_that_planned_a_summary(has_recall: bool) -> None:
    """It is cancelled before the summary that would be written ahead of time."""
    talk = Talk(Threshold(context_window=10_000, ahead=0.5), has_recall)
    if has_recall:
        await talk.say(4_500, "Something else")
    await seed(talk.chat, user("Do it."), model(words(4_500, SAID)))
    await talk.break_off()
    assert talk.llm.summaries == has_recall

    declared = talk.llm.requests[-1].config.model_dump_json()
    assert ("recall_history" in declared) is has_recall
    assert not holds(talk.plugin, SAID)


@pytest.mark.parametrize("way", ["failed", "cancelled", "deleted"])
async def test_only_the_paid_summary_stays_of_a_run_that_was_broken_off(
    way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call uses it, and it is paid for once; after that it is the session's
    alone. If its session was deleted, it waits until other sessions take its place."""
    # What ADK logs of a failure would hold the whole run.
    caplog.set_level(logging.CRITICAL + 1, "google_adk")
    talk = Talk()
    await seed(talk.chat, user("Do it."), model(words(2_500, SAID)), state=DEMAND)
    await talk.break_off(is_cancelled=way != "failed")

    assert not holds(talk.plugin, SAID)
    # Only the next run sees whether an event has brought it to the session.
    assert holds(talk.plugin, SUMMED_UP)

    if way == "deleted":
        talk.chat.session_id = "another"
        await talk.chat.say("Hello.")
        assert holds(talk.plugin, SUMMED_UP)
        monkeypatch.setattr(runs, "MAX_IDLE_SESSIONS", 1)
        await talk.chat.say("Hello.")
    else:
        assert answer_text(await talk.chat.say("Are you there?")) == "Done."
        assert talk.llm.summaries == 1
        assert SUMMED_UP in talk.llm.requests[-1].text
        assert not holds(talk.plugin, SAID)

    assert not holds(talk.plugin, SUMMED_UP)
