"""Tells the model how full its context window is, at the end of the newest message.

The line stands in the newest message alone. The next request does not have it there, so
it has to be the last thing in the request: whatever a prompt cache has of the messages
before it can be used again.
"""

from __future__ import annotations

import re

from google.genai import types

from contextguard_adk._history.adk_events import COMPACT_TOOL
from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._history.notes import FULLNESS_KEY, add_notes, split_notes
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._providers.thinkers import Thinker
from contextguard_adk._support.phrases import FULLNESS_NOTE
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Contents

_LINE_AT_END = re.compile(
    r"(?:\A|\n\n)" + re.escape(FULLNESS_NOTE.partition("{")[0]) + r"[^\n]{0,300}\Z"
)
"""The line at the end of a text, with the empty line before it, if there is one."""


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

    A request that is sent again has a line there already: it gives way to the new one.
    """
    newest = contents[-1]
    words = _describe_fullness(turn, contents)
    told_parts = _tell_in(parts_of(newest), words)
    return [*contents[:-1], with_parts(newest, told_parts)]


def _tell_in(parts: list[types.Part], words: str) -> list[types.Part]:
    """Returns the parts of a message with the words at the end of the last one."""
    line = FULLNESS_NOTE.format(words)
    last = parts[-1] if parts else types.Part()
    if last.function_response is not None:
        return [*parts[:-1], _tell_in_result(last, last.function_response, words)]
    if last.text is None:
        # After an image or another file, the line is a part of its own.
        return [*parts, types.Part(text=line)]

    text = _LINE_AT_END.sub("", last.text)
    told_text = f"{text}\n\n{line}" if text else line
    return [*parts[:-1], last.model_copy(update={"text": told_text})]


def _tell_in_result(
    part: types.Part, response: types.FunctionResponse, words: str
) -> types.Part:
    """Returns a part with the words in its result; `response` is that of the part."""
    bare, notes = split_notes(response.response or {})
    noted = add_notes(bare, {**notes, FULLNESS_KEY: words})
    told_response = response.model_copy(update={"response": noted})
    return part.model_copy(update={"function_response": told_response})


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
