"""Tells the model how full its context window is, at the end of the newest message.

The line stands in the newest message alone. The next request does not have it there, so
it has to be the last thing in the request: whatever a prompt cache has of the messages
before it can be used again.
"""

from __future__ import annotations

from google.genai import types

from contextguard_adk._history.adk_events import COMPACT_TOOL
from contextguard_adk._history.contents import with_parts
from contextguard_adk._history.notes import FULLNESS_KEY, add_notes
from contextguard_adk._history.text import payload_text
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._providers.thinkers import Thinker
from contextguard_adk._support.phrases import FULLNESS_NOTE
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Contents

_MAX_LINE_CHARS = 300
"""A line of this file is shorter than this."""


def is_told(turn: Turn, contents: Contents) -> bool:
    """Whether the model of this request is told how full its window is.

    A model that binds its thoughts is not told: the provider would refuse its thoughts
    once the line before them is gone.
    """
    settings = turn.settings
    if not settings.tell_fullness or not contents or contents[-1].role != "user":
        return False
    name = turn.model.name
    binds = settings.binds_thoughts
    return not Thinker.of(turn.model.llm, name, binds, turn.record.helped).may_bind


def tell_fullness(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Puts the line at the end of the newest message.

    A request that is sent again has the line already, and stays as it is.
    """
    newest = contents[-1]
    parts = newest.parts or []
    last_part = parts[-1] if parts else types.Part(text="")
    response = last_part.function_response
    words = _describe_fullness(turn, contents)

    if response is not None:
        result = response.response or {}
        if _has_line(payload_text(result)):
            return contents
        noted = add_notes(result, {FULLNESS_KEY: words})
        told_response = response.model_copy(update={"response": noted})
        told = last_part.model_copy(update={"function_response": told_response})
        return [*contents[:-1], with_parts(newest, [*parts[:-1], told])]

    line = FULLNESS_NOTE.format(words)
    if not last_part.text:
        # An image or another file.
        return [*contents[:-1], with_parts(newest, [*parts, types.Part(text=line)])]
    if _has_line(last_part.text):
        return contents
    told = last_part.model_copy(update={"text": f"{last_part.text}\n\n{line}"})
    return [*contents[:-1], with_parts(newest, [*parts[:-1], told])]


def _has_line(text: str) -> bool:
    """Whether a text ends with a line of this file."""
    opening = FULLNESS_NOTE.partition("{")[0]
    end = text[-_MAX_LINE_CHARS:]
    return opening in end or f'"{FULLNESS_KEY}"' in end


def _describe_fullness(turn: Turn, contents: Contents) -> str:
    """Describes the size of a request, and what the agent can do about it.

    An example: "context: 61 % of 128,000 tokens; compaction at 80 %".
    """
    config_tokens = estimate_config_tokens(turn.config)
    heuristic_tokens = config_tokens + turn.history.memo.estimate_tokens(contents)
    tokens = turn.estimate(contents, heuristic_tokens)

    window_tokens = turn.budgets.window_tokens
    percent = round(100 * tokens / window_tokens)
    due_percent = round(100 * turn.budgets.threshold_tokens / window_tokens)
    words = (
        f"context: {percent} % of {window_tokens:,} tokens; "
        f"compaction at {due_percent} %"
    )
    if COMPACT_TOOL not in turn.request.tools_dict:
        return words
    return f"{words}; call {COMPACT_TOOL} to compact earlier, when a part is finished"
