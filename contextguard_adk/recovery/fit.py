"""Makes any list of contents fit, with nothing but the contents themselves.

Used where a compaction fails in a way nobody foresaw, and for the last request that
a recovery tries. It needs no state, no session and no model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.history.pairs import pair_boundaries, pair_contents
from contextguard_adk.history.view import is_user_text
from contextguard_adk.measuring.calibration import DEFAULT_CORRECTION, token_counter
from contextguard_adk.measuring.density import estimate_text_density
from contextguard_adk.measuring.shortening import shorten_to_tokens
from contextguard_adk.measuring.tokens import (
    estimate_config_tokens,
    part_bytes,
)
from contextguard_adk.summarizing.transcript import payload_text

NOTICE = "[System: Earlier messages were left out, they exceed the context window.]"

LIVE_REQUEST_RATIO = 0.30
"""What the newest user message may take of the room."""


def reduce_contents(
    contents: Sequence[types.Content],
    room_tokens: int,
    correction: float | None = None,
    head: Sequence[types.Content] = (),
    live_index: int | None = None,
) -> list[types.Content]:
    """Keeps the newest contents that fit, and the user's request.

    Args:
        contents: The contents of a request.
        room_tokens: What they may take, system instruction and tools not included.
        correction: Real tokens per heuristic token; None while unknown.
        head: What to put first in place of a notice, such as a summary.
        live_index: Where the user's request stands. None where the head quotes it;
            without a head, the user's newest message is taken.

    Returns:
        The head, then the newest contents in order, calls and responses together.
        The newest are shortened in the middle where even they do not fit.
    """
    factor = correction or DEFAULT_CORRECTION
    first = list(head) or [_notice()]
    if _cost([*first, *contents], factor) <= room_tokens:
        return [*first, *contents]
    kept: dict[int, types.Content] = {}
    live = live_index
    if live is None and not head:
        live = _newest_user_text(contents)
    if live is not None:
        most = room_tokens * LIVE_REQUEST_RATIO
        kept[live] = _shorten_content(contents[live], most, factor)
    room = room_tokens - _cost([*first, *kept.values()], factor)
    for group in reversed(_split_groups(contents)):
        chosen = {index: contents[index] for index in group if index not in kept}
        if not chosen:
            continue
        cost = _cost(chosen.values(), factor)
        if cost > room:
            is_newest = group[-1] == len(contents) - 1
            if is_newest:
                ratio = max(0.0, room) / cost
                kept |= _shorten_group(chosen, ratio, room, factor)
            break
        kept |= chosen
        room -= cost
    return [*first, *(kept[index] for index in sorted(kept))]


def cut_request(request: LlmRequest, max_tokens: int) -> bool:
    """Cuts the contents of a request in place of a compaction that failed.

    Args:
        request: The request; its `contents` are replaced where they are too large.
        max_tokens: What the request may take, system instruction and tools included.

    Returns:
        Whether anything was cut.
    """
    config_tokens = int(estimate_config_tokens(request.config) * DEFAULT_CORRECTION)
    room = max_tokens - config_tokens
    if _cost(request.contents, DEFAULT_CORRECTION) <= room:
        return False
    request.contents = reduce_contents(request.contents, room)
    request.cache_metadata = None  # It describes a prefix that is gone.
    return True


def _notice() -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=NOTICE)])


def _newest_user_text(contents: Sequence[types.Content]) -> int | None:
    texts = (i for i in reversed(range(len(contents))) if is_user_text(contents[i]))
    return next(texts, None)


def _split_groups(contents: Sequence[types.Content]) -> list[range]:
    """Cuts contents wherever that separates no call from its response."""
    boundaries = pair_boundaries(pair_contents(contents), len(contents))
    cuts = [i for i in range(len(contents) + 1) if boundaries[i]]
    return [range(start, end) for start, end in itertools.pairwise(cuts)]


def _shorten_group(
    group: dict[int, types.Content], ratio: float, room: float, factor: float
) -> dict[int, types.Content]:
    """Shortens the contents of a group alike; nothing where they cannot fit."""
    shortened = {
        index: _shorten_content(content, _cost([content], factor) * ratio, factor)
        for index, content in group.items()
    }
    return shortened if _cost(shortened.values(), factor) <= room else {}


def _shorten_content(
    content: types.Content, max_tokens: float, factor: float
) -> types.Content:
    """Shortens texts and results of a copy; calls and media stay as they are."""
    cost = _cost([content], factor)
    if cost <= max_tokens:
        return content
    parts = [
        _shorten_part(part, max_tokens / cost, factor)
        for part in content.parts or ()
        if part is not None
    ]
    return content.model_copy(update={"parts": parts})


def _shorten_part(part: types.Part, ratio: float, factor: float) -> types.Part:
    count = token_counter(factor)
    if part.text:
        most = count(part.text) * ratio * 0.95
        text = shorten_to_tokens(part.text, most, count) or "…"
        return part.model_copy(update={"text": text})
    response = part.function_response
    if response and response.response:
        text = payload_text(response.response)
        shortened = shorten_to_tokens(text, count(text) * ratio * 0.95, count)
        copied = response.model_copy(update={"response": {"result": shortened}})
        return part.model_copy(update={"function_response": copied})
    return part


def _cost(contents: Iterable[types.Content], factor: float) -> int:
    """Tokens of contents, by the larger of correction and density."""
    return sum(
        _part_cost(part, factor) for content in contents for part in content.parts or ()
    )


def _part_cost(part: types.Part | None, factor: float) -> int:
    if part is None:
        return 0
    if part.text:
        factor = max(factor, estimate_text_density(part.text))
    elif part.function_response and part.function_response.response:
        text = payload_text(part.function_response.response)
        factor = max(factor, estimate_text_density(text))
    return math.ceil(part_bytes(part) / 4 * factor)
