"""What the guard writes reaches the session, also where ADK or a plugin before it drops
or replaces the event with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
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
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools.tool_context import ToolContext

from contextguard_adk import ContextGuardPlugin, Threshold, request_compaction
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import SUMMARY_BEGIN, Chat, answer_text, guarded_agent, model, user
from tests.chats import (
    DEMAND,
    SUMMARY,
    Watching,
    guarded_chat,
    seed,
    words,
)
from tests.fake_claude import FakeClaude
from tests.guarded import SMALL
from tests.playing import check_played, play_claude
from tests.stores import own_database, store_marks
from tests.talks import looking_tool, message, summarizing_llm

pytestmark = [
    # Those of the client, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

FOUND_WORDS = 300
OLD = (user("Do it."), model(words(2_500)))


class Looking(BaseCodeExecutor):
    """Finds by code what the tool `look` finds."""

    def execute_code(
        self,
        invocation_context: InvocationContext,
        code_execution_input: CodeExecutionInput,
    ) -> CodeExecutionResult:
        """Takes the code for the number of the step."""
        found = looking_tool(FOUND_WORDS)(step=int(code_execution_input.code))
        return CodeExecutionResult(stdout=str(found))


def looking_llm(has_executor: bool) -> SimulatedLlm:
    """A model that looks four times for each message, by code or by a tool."""
    steps = itertools.count(1)

    def reply(request: LlmRequest) -> Reply:
        step = next(steps)
        if step % 5 == 0:
            return message(step, "answer", 30)
        code = f"```tool_code\n{step}\n```"
        return code if has_executor else call("look", step=step)

    return summarizing_llm(reply)


def looking_chat(
    llm: SimulatedLlm, has_executor: bool, is_watched: bool, sessions: Any
) -> Chat:
    """A guarded chat of a new process."""
    able: dict[str, Any] = {"tools": [looking_tool(FOUND_WORDS)]}
    if has_executor:
        able = {"code_executor": Looking()}
    before = [Watching("watching")] if is_watched else []
    guard = ContextGuardPlugin(default=Threshold(context_window=3_000, keep=0.2))
    agent = guarded_agent(llm, **able)
    chat = Chat(agent, [*before, guard], session_service=sessions)
    chat.runner.artifact_service = InMemoryArtifactService()
    return chat


KINDS = ("memory", "sqlite", "postgres")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=store_marks(kind, is_slow=kind != "memory"))
        for kind in KINDS
    ],
)
async def test_code_costs_no_more_summaries_than_a_tool(
    kind: str, tmp_path: Path
) -> None:
    """ADK drops the event of a model that writes code."""
    summaries = []
    for has_executor, is_watched in ((False, False), (True, False), (True, True)):
        llm = looking_llm(has_executor)
        folder = tmp_path / f"{has_executor} {is_watched}"
        folder.mkdir()
        async with own_database(kind, folder) as store:
            for number in range(3):
                async with store.open() as sessions:
                    chat = looking_chat(llm, has_executor, is_watched, sessions)
                    assert answer_text(await chat.say(message(number)))
        assert (llm.rejections, llm.violations) == (0, 0)
        summaries.append(llm.summaries)

    of_tool, *of_code = summaries

    assert of_tool >= 4
    assert max(of_code) <= 1.2 * of_tool


class Replacing(BasePlugin):
    """Replaces every event; ADK asks no plugin behind it then."""

    is_on = True

    async def on_event_callback(
        self, *, invocation_context: InvocationContext, event: Event
    ) -> Event | None:
        """Returns a copy."""
        return event.model_copy(update=self.change(event)) if self.is_on else None

    def change(self, event: Event) -> dict[str, Any]:
        """Stamps it with a tenant."""
        stamp = {**(event.custom_metadata or {}), "tenant": "a"}
        return {"custom_metadata": stamp}


class Dropping(Replacing):
    """Takes the actions from every event."""

    def change(self, event: Event) -> dict[str, Any]:
        """Puts none in their place."""
        return {"actions": EventActions()}


@pytest.mark.parametrize("is_late", [False, True], ids=["alone", "another process"])
async def test_paid_summary_outlives_the_events_of_its_run(is_late: bool) -> None:
    """Of a run whose state was lost the newest summary comes back in the next one,
    unless another process has stored a newer one by then."""
    numbers = itertools.count(1)
    llm = SimulatedLlm(
        context_window=100_000,  # What was lost is summarized in one piece.
        script=[*[call("look", step=step) for step in range(8)], "Found."],
        summary_replies=lambda _: f"Summary {next(numbers)}.",
    )
    dropping = Dropping("dropping")
    tools = {"tools": [looking_tool(2 * FOUND_WORDS)]}
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


@pytest.mark.quick("False")
@pytest.mark.litellm
@pytest.mark.parametrize("is_streaming", [False, True])
async def test_state_survives_a_plugin_that_replaces_events(
    serve: Callable[..., str], is_streaming: bool
) -> None:
    """Each turn starts anew: the session has all keys, seals and summaries."""
    alone = await play_replaced([], serve, is_streaming=is_streaming)
    stamped = await play_replaced(
        [Replacing("stamps")], serve, is_streaming=is_streaming
    )

    assert any("summary" in key for key in alone["keys"])
    assert any(alone["seals"]) or is_streaming
    assert stamped == alone


async def play_replaced(
    before: list[BasePlugin], serve: Callable[..., str], *, is_streaming: bool
) -> dict[str, Any]:
    """The keys and seals in a session behind such plugins, and what was asked."""
    fake = FakeClaude()
    serve(fake)
    player = play_claude(
        fake,
        strategy=Threshold(context_window=5_000),
        before=lambda: before,
        is_streaming=is_streaming,
    )
    for number in range(4):
        await player.say(player.steps(3, has_log=not number))
        await player.change()  # Nothing is left but the session.
    check_played(player, compactions=1)

    events = await player.events()
    metadata = [event.custom_metadata or {} for event in events]
    assert any("tenant" in each for each in metadata) is bool(before)
    return {
        "keys": {key for event in events for key in event.actions.state_delta},
        "seals": [{key for key in each if "seal" in key} for each in metadata],
        "requests": [each.body for each in fake.exchanges],
    }


async def test_a_demand_in_each_step_is_met_and_gone() -> None:
    """The next turn compacts nothing that nobody has asked for."""

    def ask(tool_context: ToolContext) -> str:
        """Asks for a compaction."""
        request_compaction(tool_context.state)
        return words(2_500)

    script: list[Reply] = [call("ask"), call("ask"), call("ask"), *["Done."] * 2]
    llm = SimulatedLlm(script=script, summary_replies=lambda _: "A summary.")
    wide = Threshold(context_window=40_000)
    before = [Replacing("stamps")]
    chat = guarded_chat(llm, wide, before=before, agent={"tools": [ask]})
    await seed(chat, *OLD)

    await chat.say("Go on.")
    paid = llm.summaries
    await chat.say("Go on. " + words(2_000))

    assert paid
    assert llm.summaries == paid
