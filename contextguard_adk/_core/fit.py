"""Makes any list of contents fit, with nothing but the contents themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk._history.contents import (
    is_user_text,
    join_messages,
    join_new_texts,
    pair_boundaries,
    parts_of,
)
from contextguard_adk._history.moved_media import MediaMover
from contextguard_adk._history.order import put_in_order
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._history.text import payload_text
from contextguard_adk._history.truncation import list_names, name_rest
from contextguard_adk._measuring.budgets import TokenCounter, shorten_to_tokens
from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION, token_counter
from contextguard_adk._measuring.density import estimate_text_density
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens
from contextguard_adk._providers.clients import json_form
from contextguard_adk._summaries.compose import (
    render_head,
    shorten_stored,
    tell_left_out,
)
from contextguard_adk._support.phrases import SYSTEM, quote
from contextguard_adk._turn.turn import Turn

# The part of the room that the message with the summary may take at most. The request
# and the newest contents get the rest.
_HEAD_RATIO = 0.5

NOTICE = f"{SYSTEM}Earlier messages were left out, they exceed the context window.]"


@dataclass(frozen=True)
class Scale:
    """Measures contents, by the larger of a correction and the density of each text.

    Attributes:
        correction: Tokens of the model per byte / 4.
        memo: Remembers the sizes and texts of contents.
    """

    correction: float = DEFAULT_CORRECTION
    memo: Memo = field(default_factory=Memo)

    @cached_property
    def count(self) -> TokenCounter:
        """Estimates a text, in tokens of the model."""
        return token_counter(self.correction)

    def measure(self, contents: Iterable[types.Content]) -> int:
        """Estimates contents, in tokens of the model."""
        tokens = 0
        for content in contents:
            for part in parts_of(content):
                density = estimate_text_density(self.memo.part_text(part))
                size_bytes = self.memo.part_bytes(part)
                tokens += math.ceil(size_bytes / 4 * max(self.correction, density))
        return tokens

    def shorten(self, content: types.Content, max_tokens: float) -> types.Content:
        """Shortens texts and results of a copy; calls and media stay as they are."""
        tokens = self.measure([content])
        if tokens <= max_tokens:
            return content

        ratio = max_tokens / tokens * 0.95
        parts = [self._shorten_part(part, ratio) for part in parts_of(content)]
        return content.model_copy(update={"parts": parts})

    def _shorten_part(self, part: types.Part, ratio: float) -> types.Part:
        if part.text:
            text = quote(part.text)
            shortened = shorten_to_tokens(text, self.count(text) * ratio, self.count)
            return part.model_copy(update={"text": shortened or "…"})

        response = part.function_response
        if response is None or not response.response:
            return part

        # Some room is left for values that the shortened result does not show.
        text = quote(payload_text(response.response))
        max_tokens = self.count(text) * ratio * 0.6
        shortened = shorten_to_tokens(text, max_tokens, self.count)
        values = list_names(response.response)
        named = name_rest(values, {"result": shortened}, len(shortened) // 4)
        short_response = response.model_copy(update={"response": named})
        return part.model_copy(update={"function_response": short_response})


@dataclass(frozen=True)
class Frame:
    """The parts of a list of contents that is to be cut.

    Attributes:
        request_index: The index of the user's request; None if it is unknown, or if the
            head quotes it.
        running_turn: The indexes of the contents that follow the request.
        head: The message with the summary; empty if there is none.
    """

    request_index: int | None
    running_turn: Collection[int]
    head: Sequence[types.Content] = ()


def reduce_contents(
    contents: Sequence[types.Content],
    room_tokens: int,
    scale: Scale | None = None,
    frame: Frame | None = None,
) -> list[types.Content]:
    """Keeps the head or a notice, the user's request, and the newest contents that fit.

    Calls of the running turn that are left out are listed.

    Args:
        contents: The contents that are to be cut.
        room_tokens: The most tokens of the contents that are left.
        scale: Measures contents; None is the usual scale.
        frame: The parts of the contents; None if they are unknown. Then the newest
            message of the user is taken for the request.
    """
    scale = scale or Scale()
    frame = frame or _guess_frame(contents)
    first = _begin(frame.head, calls="")
    if scale.measure([*first, *contents]) <= room_tokens:
        return join_messages(first, contents)

    # Without a list of its calls the agent repeats them. The list of those that are
    # left out may take no more than the list of all.
    turn = frame.running_turn
    max_list_tokens = int(room_tokens * 0.20)
    full_list = tell_left_out(contents, turn, max_list_tokens, scale.count, scale.memo)
    list_tokens = scale.count(full_list)
    left_tokens = room_tokens - list_tokens

    request: dict[int, types.Content] = {}
    if frame.request_index is not None:
        whole = contents[frame.request_index]
        request[frame.request_index] = scale.shorten(whole, left_tokens * 0.30)
    left_tokens -= scale.measure([*first, *request.values()])
    newest = _keep_newest(contents, request, left_tokens, scale)
    kept = {**request, **newest}

    gone = [index for index in turn if index not in kept]
    calls = tell_left_out(contents, gone, list_tokens, scale.count, scale.memo)
    newest_last = [kept[index] for index in sorted(kept)]
    return join_messages(_begin(frame.head, calls), newest_last)


def _begin(head: Sequence[types.Content], calls: str) -> list[types.Content]:
    """Returns the head, else a notice, with a list of the calls that are left out."""
    if not head:
        notice = f"{NOTICE}\n\n{calls}" if calls else NOTICE
        return [types.UserContent(notice)]
    return [*head, types.UserContent(calls)] if calls else [*head]


def _guess_frame(contents: Sequence[types.Content]) -> Frame:
    """Takes the newest message of the user for the request."""
    request_index = _find_newest_message(contents)
    turn_start = 0 if request_index is None else request_index + 1
    return Frame(request_index, range(turn_start, len(contents)))


def _find_newest_message(contents: Sequence[types.Content]) -> int | None:
    """Returns the index of the user's newest message; None if there is none."""
    indexes = [index for index, content in enumerate(contents) if is_user_text(content)]
    return indexes[-1] if indexes else None


def _keep_newest(
    contents: Sequence[types.Content],
    request_indexes: Collection[int],
    room_tokens: int,
    scale: Scale,
) -> dict[int, types.Content]:
    """Returns the newest contents that fit, by index; splits no call from its result.

    If the newest group of calls and results does not fit whole, it is shortened. The
    user's request is left out, because it has its own room.
    """
    boundaries = pair_boundaries(contents)
    cuts = [cut for cut, splits_no_pair in enumerate(boundaries) if splits_no_pair]
    kept: dict[int, types.Content] = {}
    left_tokens = room_tokens
    for start, end in reversed(list(itertools.pairwise(cuts))):
        group = {
            index: contents[index]
            for index in range(start, end)
            if index not in request_indexes
        }
        group_tokens = scale.measure(group.values())
        if group and group_tokens > left_tokens:
            is_newest_group = end == len(contents)
            if is_newest_group:
                kept |= _shorten_group(group, left_tokens, scale)
            break

        kept |= group
        left_tokens -= group_tokens
    return kept


def _shorten_group(
    group: Mapping[int, types.Content], room_tokens: int, scale: Scale
) -> Mapping[int, types.Content]:
    """Returns contents that are shortened by one ratio; {} if they still do not fit."""
    ratio = max(0.0, room_tokens) / scale.measure(group.values())
    shortened = {
        index: scale.shorten(content, scale.measure([content]) * ratio)
        for index, content in group.items()
    }
    fits = scale.measure(shortened.values()) <= room_tokens
    return shortened if fits else {}


def minimize(turn: Turn, room_tokens: int, correction: float) -> list[types.Content]:
    """Returns summary, current request and the newest contents that fit.

    Args:
        turn: The model call.
        room_tokens: The most tokens of these contents together.
        correction: Tokens of the model per byte / 4.
    """
    history = turn.history
    head = _render_short_head(turn, room_tokens * _HEAD_RATIO, correction)
    frame = Frame(
        request_index=_find_unquoted_request(turn, head),
        running_turn=history.running_turn,
        head=[] if head is None else [head.content],
    )
    scale = Scale(correction, history.memo)
    reduced = reduce_contents(history.shown, room_tokens, scale, frame)
    # A refusal of their form names the end of these contents as they are sent.
    return put_in_order(reduced, turn.media_mover)


class _Head(NamedTuple):
    """A message with a stored summary that was shortened."""

    stored: StoredSummary
    content: types.Content


def _render_short_head(
    turn: Turn, max_tokens: float, correction: float
) -> _Head | None:
    """Returns the message with the summary, as short as it has to be.

    Returns:
        The longest form that fits; else the last form that was tried, if it has only
        sections that need no summary. Otherwise None, and a notice takes its place.
    """
    history = turn.history
    head: _Head | None = None
    for stored in shorten_stored(turn, history.stored):
        content = render_head(history, stored, history.covered, turn.media_mover)
        head = _Head(stored, content)
        if history.memo.estimate_tokens([content]) * correction <= max_tokens:
            return head

    if head is None or head.stored.text:
        return None
    return head


def _find_unquoted_request(turn: Turn, head: _Head | None) -> int | None:
    """Returns the index of the user's request if no message with a summary quotes it.

    There are four cases:
    - The history does not tell the request, and there is no head: the newest message of
      the user is taken for the request.
    - The history does not tell the request, and there is a head: None.
    - The head quotes the request: None.
    - The head does not quote the request, or there is no head: the request's index.
    """
    history = turn.history
    request_index = history.request_index
    if request_index is None and head is None:
        return _find_newest_message(history.shown)
    if request_index is None or head is None:
        return request_index
    if not head.stored.has_continuation:
        return request_index

    is_quoted = head.stored.request == history.fingerprint(request_index).hex()
    return None if is_quoted else request_index


def cut_request(request: LlmRequest, max_tokens: int, llm: object) -> None:
    """Cuts a request to a model that is too large, after a compaction that failed.

    Args:
        request: The request, whose contents are replaced if they do not fit.
        max_tokens: The most tokens of contents, instruction and tools together.
        llm: The model as ADK calls it; None if it is unknown.
    """
    scale = Scale(memo=Memo(form=json_form(llm)))
    config_tokens = int(estimate_config_tokens(request.config) * DEFAULT_CORRECTION)
    room_tokens = max_tokens - config_tokens
    if scale.measure(request.contents) <= room_tokens:
        return

    page_tokens = max_tokens // 10
    mover = MediaMover(llm, request.model or "", page_tokens)
    reduced = reduce_contents(request.contents, room_tokens, scale)
    ordered = put_in_order(reduced, mover)
    request.contents = join_new_texts(ordered, request.contents)
    request.cache_metadata = None  # It describes a prefix that is gone.
