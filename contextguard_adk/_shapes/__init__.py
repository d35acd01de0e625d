"""The forms in which providers accept contents, and the requests that need each form.

A shape is one such form. `Shape` explains the columns of the table.
"""

from __future__ import annotations

import re

from contextguard_adk._history.contents import join_new_texts
from contextguard_adk._providers.clients import Client
from contextguard_adk._shapes.claude_thoughts import fit_claude
from contextguard_adk._shapes.fullness import is_told, tell_fullness
from contextguard_adk._shapes.media_limit import MediaLimit, limit_media, lower_limit
from contextguard_adk._shapes.recalled_files import attach_recalled_files
from contextguard_adk._shapes.refused_forms import (
    help_as_text,
    help_sign_calls,
    help_take_turns,
    join_own_messages,
    sign_calls,
    sign_refused_calls,
    take_turns,
    tell_as_text,
)
from contextguard_adk._shapes.repair import repair
from contextguard_adk._shapes.sealed_thoughts import (
    help_thoughts,
    leave_out_thoughts,
)
from contextguard_adk._shapes.unknown_blocks import leave_out_unknown_blocks
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Contents, Shape

_SIGNING = re.compile(r"gemini-([3-9]|\d\d|(pro|flash|flash-lite)-latest)")
"""A part of the names of models that want signed calls: Gemini 3 and later.

Names such as "gemini-flash-latest" mean the newest model, which is later than Gemini 3.
"""


def _has_results(contents: Contents) -> bool:
    """Whether any content has a tool's result."""
    for content in contents:
        for part in content.parts or ():
            if part and part.function_response:
                return True
    return False


def _has_signed_thoughts(turn: Turn, contents: Contents) -> bool:
    """Whether any content has a thought with a signature."""
    for content in contents:
        for part in content.parts or ():
            if part and part.thought and part.thought_signature:
                return True
    return False


def _has_helped(turn: Turn, remedy: str) -> bool:
    """Whether the session has a remedy of `refused_forms`, by the remedy's key."""
    remedies = turn.record.helped or {}
    return bool(remedies.get(remedy))


SHAPES: tuple[Shape, ...] = (
    Shape(
        # Only such contents may begin with the model, or have a result without a call.
        repair,
        when=lambda turn, contents: (
            bool(contents) and (contents[0].role == "model" or _has_results(contents))
        ),
    ),
    Shape(
        attach_recalled_files,
        when=lambda turn, contents: (
            turn.history.stored is not None and _has_results(contents)
        ),
    ),
    Shape(
        limit_media,
        when=lambda turn, contents: MediaLimit in turn.facts.units,
        relieve=lower_limit,
    ),
    Shape(
        tell_as_text,
        when=lambda turn, contents: _has_helped(turn, "flat"),
        help=help_as_text,
    ),
    Shape(
        take_turns,
        when=lambda turn, contents: _has_helped(turn, "shape"),
        help=help_take_turns,
    ),
    Shape(
        join_own_messages,
        when=lambda turn, contents: (
            Client.of(turn.model.llm).name == "LiteLlm"
            and turn.is_changed(contents)
            and not _has_helped(turn, "shape")
        ),
    ),
    Shape(
        sign_refused_calls,
        when=lambda turn, contents: _has_helped(turn, "signed"),
        help=help_sign_calls,
    ),
    Shape(
        sign_calls,
        when=lambda turn, contents: (
            bool(_SIGNING.search(turn.model.name))
            and Client.of(turn.model.llm).name == "Gemini"
        ),
    ),
    Shape(
        # `LiteLlm` sends a message with several texts as a list of texts. Some chat
        # templates take only one string. Messages that the guard has not changed stay
        # as they are.
        lambda turn, contents: join_new_texts(contents, turn.history.contents),
        when=lambda turn, contents: turn.is_changed(contents),
    ),
    Shape(leave_out_thoughts, when=_has_signed_thoughts, help=help_thoughts),
    Shape(
        leave_out_unknown_blocks,
        when=lambda turn, contents: Client.of(turn.model.llm).name == "AnthropicLlm",
    ),
    Shape(
        fit_claude,
        when=lambda turn, contents: Client.of(turn.model.llm).name == "AnthropicLlm",
    ),
    Shape(tell_fullness, when=is_told),
)
"""A request goes through the shapes in this order.

When a provider has refused a request, the shapes are asked for help in the reverse
order, because a later shape changes less.
"""
