"""What the guard writes reaches the session, also where ADK drops the event with it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.artifacts import InMemoryArtifactService
from google.adk.code_executors.base_code_executor import BaseCodeExecutor
from google.adk.code_executors.code_execution_utils import (
    CodeExecutionInput,
    CodeExecutionResult,
)
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import BaseSessionService

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import SUMMARY_BEGIN, Chat, answer_text, guarded_agent, model, user
from tests.chats import (
    DEMAND,
    REAL,
    SUMMARY,
    Watching,
    guarded_chat,
    seed,
    words,
)
from tests.guarded import SMALL
from tests.talks import looking_tool, message, summarizing_llm
from tests.test_databases import own_database, store_marks

STRATEGY = Threshold(context_window=3_000, keep=0.2)


class Looking(BaseCodeExecutor):
    """Finds by code what the tool `look` finds."""

    def execute_code(
        self,
        invocation_context: InvocationContext,
        code_execution_input: CodeExecutionInput,
    ) -> CodeExecutionResult:
        """Takes the code for the number of the step."""
        found = looking_tool()(step=int(code_execution_input.code))
        return CodeExecutionResult(stdout=str(found))


def looking(has_executor: bool) -> Callable[[LlmRequest], Reply]:
    """A model that looks six times for each message, by code or by a tool."""
    steps = itertools.count(1)

    def reply(request: LlmRequest) -> Reply:
        step = next(steps)
        if step % 7 == 0:
            return message(step, "answer", 30)
        code = f"```tool_code\n{step}\n```"
        return code if has_executor else scripted_call("look", step=step)

    return reply


def looking_chat(
    llm: SimulatedLlm,
    has_executor: bool,
    *plugins: BasePlugin,
    sessions: BaseSessionService | None = None,
    before: Sequence[BasePlugin] = (),
) -> Chat:
    """A guarded chat of a new process."""
    able: dict[str, Any] = {"tools": [looking_tool()]}
    if has_executor:
        able = {"code_executor": Looking()}
    guard = ContextGuardPlugin(default=STRATEGY)
    agent = guarded_agent(llm, **able)
    chat = Chat(agent, [*before, guard, *plugins], session_service=sessions)
    chat.runner.artifact_service = InMemoryArtifactService()
    return chat


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=store_marks(k)) for k in ("memory", "sqlite", "postgres")],
)
async def test_code_costs_no_more_summaries_than_a_tool(
    kind: str, tmp_path: Path
) -> None:
    """ADK drops the event of a model that writes code; six turns, each in a process of
    its own. A plugin before the guard that looks at events changes nothing."""
    summaries = []
    for has_executor, looks in ((False, False), (True, False), (True, True)):
        llm = summarizing_llm(looking(has_executor))
        folder = tmp_path / f"{has_executor} {looks}"
        folder.mkdir()
        async with own_database(kind, folder) as store:
            for number in range(6):
                async with store.open() as service:
                    before = [Watching("watching")] if looks else []
                    chat = looking_chat(
                        llm, has_executor, sessions=service, before=before
                    )
                    assert answer_text(await chat.say(message(number)))
        assert (llm.rejections, llm.violations) == (0, 0)
        summaries.append(llm.summaries)
    of_tool, *of_code = summaries
    assert of_tool >= 4
    assert max(of_code) <= 1.2 * of_tool


@pytest.mark.parametrize("has_executor", [False, True], ids=["tool", "code"])
async def test_one_event_tells_of_each_compaction(
    has_executor: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where ADK replaces that of the model."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    llm = summarizing_llm(looking(has_executor))
    chat = looking_chat(llm, has_executor)
    events = [event for number in range(3) for event in await chat.say(message(number))]
    said = [(event.custom_metadata or {}).get("context_guard") for event in events]
    count = caplog.text.count("Compacted agent")
    assert count >= 2
    assert ["compaction" in each for each in said if each] == [True] * count


class Counting(BasePlugin):
    """Writes a count of its own after every model call."""

    async def after_model_callback(
        self, *, callback_context: CallbackContext, llm_response: LlmResponse
    ) -> None:
        """Writes it."""
        callback_context.state[REAL] = 777


async def test_what_others_wrote_later_stands() -> None:
    """A value that the guard wrote before does not come back with a later event."""
    chat = looking_chat(summarizing_llm(looking(True)), True, Counting("counting"))
    events = await chat.say(message(0))
    assert {e.actions.state_delta.get(REAL, 777) for e in events} == {777}
    assert (await chat.state())[REAL] == 777


class Dropping(BasePlugin):
    """Takes the actions from every event, and keeps other plugins from seeing it."""

    is_on = True

    async def on_event_callback(
        self, *, invocation_context: InvocationContext, event: Event
    ) -> Event | None:
        """Replaces the event."""
        if not self.is_on:
            return None
        return event.model_copy(update={"actions": EventActions()})


@pytest.mark.parametrize("is_late", [False, True], ids=["alone", "another process"])
async def test_paid_summary_outlives_the_events_of_its_run(is_late: bool) -> None:
    """Of a run whose state was lost the newest summary comes back in the next one,
    unless another process has stored a newer one by then."""
    numbers = itertools.count(1)
    llm = SimulatedLlm(
        context_window=100_000,  # What was lost is summarized in one piece.
        script=[*[scripted_call("look", step=step) for step in range(40)], "Found."],
        summary_replies=lambda _: f"Summary {next(numbers)}.",
    )
    dropping = Dropping("dropping")
    tools = {"tools": [looking_tool(150)]}
    chat = guarded_chat(llm, SMALL, before=[dropping], agent=tools)
    assert answer_text(await chat.say("Go.")) == "Found."
    paid_count = llm.summaries
    assert paid_count >= 2
    assert not (await chat.state()).get(SUMMARY)
    dropping.is_on = False
    if is_late:
        other = guarded_chat(llm, SMALL, agent=tools, session_service=chat.sessions)
        await other.say("Is anybody there?")
        assert llm.summaries == paid_count + 1
        paid_count = llm.summaries
    await chat.say("Are you there?")
    assert llm.summaries == paid_count
    assert (await chat.state())[SUMMARY].startswith(f"Summary {paid_count}.")
    assert SUMMARY_BEGIN in llm.requests[-1].text


async def test_a_failed_call_leaves_its_summary() -> None:
    """The event that tells of the failure carries it, even to another process."""
    script: list[Reply] = [ConnectionError("reset"), "Done."]
    llm = SimulatedLlm(context_window=100_000, script=script)
    chat = guarded_chat(llm, SMALL)
    await seed(chat, user("The task."), model(words(3_000)), state=DEMAND)
    with suppress(ConnectionError):
        await chat.say("Go on.")
    await guarded_chat(llm, SMALL, session_service=chat.sessions).say("Are you there?")
    assert llm.summaries == 1
    assert SUMMARY_BEGIN in llm.requests[-1].text
