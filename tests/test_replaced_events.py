"""A plugin before the guard that replaces events keeps nothing from the session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools.tool_context import ToolContext

from contextguard_adk import Threshold, request_compaction
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import model, user
from tests.chats import DEMAND, HEURISTIC, REAL, SUMMARY, guarded_chat, seed, words
from tests.fake_claude import FakeClaude
from tests.guarded import SMALL
from tests.playing import check_played, play_claude

pytestmark = [
    # Those of the client, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

Serve = Callable[..., str]


class Stamps(BasePlugin):
    """Stamps every event with a tenant; ADK asks no plugin behind it then."""

    async def on_event_callback(
        self, *, invocation_context: InvocationContext, event: Event
    ) -> Event:
        """Returns a copy."""
        stamp = {**(event.custom_metadata or {}), "tenant": "a"}
        return event.model_copy(update={"custom_metadata": stamp})


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_state_survives_a_plugin_that_replaces_events(
    serve: Serve, is_streaming: bool
) -> None:
    """Each turn starts anew: the session has all keys, seals and summaries."""
    found: list[dict[str, Any]] = []
    for before in ([], [Stamps(name="stamps")]):
        fake = FakeClaude()
        serve(fake)
        player = play_claude(
            fake,
            strategy=Threshold(context_window=6_000),
            before=lambda before=before: before,
            is_streaming=is_streaming,
        )
        for number in range(5):
            await player.say(player.steps(3, has_log=number == 1))
            await player.change()  # Nothing is left but the session.
        check_played(player, compactions=1)
        events = await player.events()
        tenants = [(e.custom_metadata or {}).get("tenant") for e in events]
        assert ("a" in tenants) is bool(before)
        found.append(
            {
                "keys": {k for e in events for k in e.actions.state_delta},
                "seals": [
                    {k for k in e.custom_metadata or () if "seal" in k} for e in events
                ],
                "summaries": sum(each.is_summary for each in fake.exchanges),
                "requests": [each.body for each in fake.exchanges],
            }
        )
    assert any("summary" in key for key in found[0]["keys"])
    assert any(found[0]["seals"]) or is_streaming
    assert found[1] == found[0]


async def test_what_a_compaction_clears_is_cleared() -> None:
    """Counts are those of the history before it, and the model reports none."""
    llm = SimulatedLlm(summary_replies=lambda _: "A summary.", usage="never")
    chat = guarded_chat(llm, SMALL, before=[Stamps(name="stamps")])
    old, counts = (user("Do it."), model(words(2_500))), {REAL: 5_000, HEURISTIC: 3_000}
    await seed(chat, *old, state={**DEMAND, **counts})

    await chat.say("Go on.")

    state = await chat.state()
    assert state[SUMMARY] == "A summary."
    assert [state[REAL], state[HEURISTIC]] == [None, None]


async def test_a_demand_in_each_step_is_met_and_gone() -> None:
    """The next turn compacts nothing that nobody has asked for."""

    def ask(tool_context: ToolContext) -> str:
        """Asks for a compaction."""
        request_compaction(tool_context.state)
        return words(2_500)

    script: list[Reply] = [call("ask"), call("ask"), call("ask"), *["Done."] * 2]
    llm = SimulatedLlm(script=script, summary_replies=lambda _: "A summary.")
    wide, before = Threshold(context_window=40_000), [Stamps(name="stamps")]
    chat = guarded_chat(llm, wide, before=before, agent={"tools": [ask]})
    await seed(chat, user("Do it."), model(words(2_500)))

    await chat.say("Go on.")
    paid = llm.summaries
    await chat.say("Go on. " + words(2_000))

    assert paid
    assert llm.summaries == paid
