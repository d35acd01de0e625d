"""The cache of one run measures like the functions that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.coverage import fingerprint
from contextguard_adk.run_cache import RunCache
from contextguard_adk.testing import SimulatedLlm
from contextguard_adk.tokens import estimate_contents_tokens
from tests.builders import (
    Chat,
    call,
    call_part,
    guarded_agent,
    model,
    response,
    response_part,
    responses,
    user,
)

PAYLOAD: dict[str, Any] = {"rows": [{"id": 1, "name": "ünï", "of": None}] * 3}
CONTENTS = {
    "text": user("Hello."),
    "other role": model("Hello."),
    "not ASCII": user("你好"),
    "several parts": user("Hello.", "There."),
    "no parts": types.Content(role="user"),
    "call": call("look", "id-1", at="x"),
    "result": response("look", PAYLOAD),
    "result of another tool": response("read", PAYLOAD),
    "result as text": response("look", "plain"),
    "empty result": response("look", {}),
    "results": responses(response_part("look", PAYLOAD), response_part("look")),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_the_cache_measures_like_the_functions(content: types.Content) -> None:
    """The first time, the second time, and beside contents that share a payload."""
    cache = RunCache()
    for other in CONTENTS.values():
        cache.fingerprint(other)
        cache.estimate_contents_tokens([other])
    for _ in range(2):
        assert cache.fingerprint(content) == fingerprint(content)
        assert cache.estimate_contents_tokens([content]) == estimate_contents_tokens(
            [content]
        )


def test_equal_ids_of_other_results_are_not_confused() -> None:
    """A result that takes the place of another in memory is measured anew."""
    cache = RunCache()
    for number in range(50):
        content = response("look", {"text": "x" * number})
        assert cache.fingerprint(content) == fingerprint(content)
        tokens = cache.estimate_contents_tokens([content])
        assert tokens == estimate_contents_tokens([content])


async def test_nothing_is_kept_when_a_run_has_ended() -> None:
    """A cache lives as long as its run: it holds what tools returned."""
    guard = ContextGuardPlugin(default=Threshold(context_window=8_000))
    llm = SimulatedLlm(script=[call_part("fetch"), "Done."])
    chat = Chat(guarded_agent(llm, [fetch]), [guard])
    await chat.say("Go.")
    assert llm.calls == 2
    assert len(guard._memory.caches) <= 1  # ADK 2.0 does not tell when a run ends.
    await chat.say("Again.")
    assert len(guard._memory.caches) <= 1


def fetch() -> dict[str, Any]:
    """Fetches."""
    return PAYLOAD
