"""An agent that searches, at a provider whose window is smaller than was configured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.genai import types

from contextguard_adk import Threshold
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import (
    ContextOverflowError,
    Reply,
    SimulatedLlm,
)
from tests.builders import (
    Chat,
    answer_text,
    call_part,
    queued_tool,
)
from tests.chats import (
    guarded_chat,
)

CONFIGURED_TOKENS = 200_000
REAL_TOKENS = 8_000
FINDING = "The scanner found part 7f3a of the old press in hall B. " * 130
LIMITS: dict[str, Any] = {"context_window": CONFIGURED_TOKENS, "preview_tokens": 0.2}
THRESHOLD = Threshold(**LIMITS)


def overflow(limit: int = REAL_TOKENS, used: int = 9_000) -> ContextOverflowError:
    """A rejection that names both numbers."""
    return ContextOverflowError(f"prompt is too long: {used} tokens > {limit} maximum")


def make_llm(
    script: Sequence[Reply], window_tokens: int = CONFIGURED_TOKENS, **settings: Any
) -> SimulatedLlm:
    """A model that plays a script."""
    settings = {"token_ratio": 1.0, **settings}
    return SimulatedLlm(context_window=window_tokens, script=script, **settings)


def open_chat(
    llm: SimulatedLlm,
    strategy: Strategy = THRESHOLD,
    agent: dict[str, Any] | None = None,
    **settings: Any,
) -> Chat:
    """A chat whose agent searches."""
    made = {"tools": [queued_tool("search", [FINDING])], **(agent or {})}
    return guarded_chat(llm, strategy, agent=made, **settings)


def working_script(turns: int, searches: int = 2) -> list[Reply]:
    """Searches and then answers, turn by turn."""
    script: list[Reply] = []
    for turn in range(turns):
        script += [*[call_part("search")] * searches, f"Answer {turn}."]
    return script


async def work(chat: Chat, turns: int, start: int = 0) -> None:
    """Has some turns; each must end with its answer and with usage."""
    for turn in range(start, start + turns):
        events = await chat.say(f"Question {turn}?")
        assert answer_text(events) == f"Answer {turn}."
        final = [event for event in events if not event.partial][-1]
        assert final.usage_metadata is not None
        assert final.usage_metadata.prompt_token_count


INPUT_PLUS_OUTPUT = ContextOverflowError(
    "input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000, "
    "decrease input length or `max_tokens` and try again"
)

RESERVING = {
    "generate_content_config": types.GenerateContentConfig(max_output_tokens=64_000)
}
