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
from contextguard_adk.measuring.tokens import estimate_config_tokens, part_bytes
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
    first = list(head) or [types.Content(role="user", parts=[types.Part(text=NOTICE)])]
    if _cost([*first, *contents], factor) <= room_tokens:
        return [*first, *contents]
    kept: dict[int, types.Content] = {}
    if live_index is None and not head:
        texts = [index for index, item in enumerate(contents) if is_user_text(item)]
        live_index = texts[-1] if texts else None
    if live_index is not None:
        most = room_tokens * LIVE_REQUEST_RATIO
        kept[live_index] = _shorten_content(contents[live_index], most, factor)
    room = room_tokens - _cost([*first, *kept.values()], factor)
    boundaries = pair_boundaries(pair_contents(contents), len(contents))
    cuts = [index for index, splits_no_pair in enumerate(boundaries) if splits_no_pair]
    for start, end in reversed(list(itertools.pairwise(cuts))):
        group = {i: contents[i] for i in range(start, end) if i not in kept}
        cost = _cost(group.values(), factor)
        if group and cost > room:
            if end == len(contents):
                kept |= _shorten_group(group, max(0.0, room) / cost, room, factor)
            break
        kept |= group
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
    ratio = max_tokens / cost * 0.95
    parts = [_shorten_part(part, ratio, factor) for part in content.parts or () if part]
    return content.model_copy(update={"parts": parts})


def _shorten_part(part: types.Part, ratio: float, factor: float) -> types.Part:
    text, count = _text_of(part), token_counter(factor)
    if not text:
        return part
    shortened = shorten_to_tokens(text, count(text) * ratio, count)
    if part.text:
        return part.model_copy(update={"text": shortened or "…"})
    result = {"response": {"result": shortened}}
    answer = part.function_response and part.function_response.model_copy(update=result)
    return part.model_copy(update={"function_response": answer})


def _text_of(part: types.Part) -> str:
    """The text or the result in a part; "" where it holds neither."""
    result = part.function_response and part.function_response.response
    return part.text or (payload_text(result) if result else "")


def _cost(contents: Iterable[types.Content], factor: float) -> int:
    """Tokens of contents, by the larger of correction and density."""
    parts = (part for content in contents for part in content.parts or () if part)
    cost = 0
    for part in parts:
        text = _text_of(part)
        density = estimate_text_density(text) if text else 0.0
        cost += math.ceil(part_bytes(part) / 4 * max(factor, density))
    return cost
