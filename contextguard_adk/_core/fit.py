"""Cuts a list of contents so that it fits, without a model.

A cut list begins with a head, which is the message with the summary. Without a summary
it begins with a notice instead. Then come the user's request and the newest contents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

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

# The most that a part of the cut list may take of the room. The newest contents get the
# rest.
_HEAD_RATIO = 0.5
_CALLS_RATIO = 0.20
_REQUEST_RATIO = 0.30

# The texts of a content are shortened to this part of its room. The rest is a reserve,
# because calls and media of the same content cannot be shortened.
_SHORTENED_RATIO = 0.95

# A shortened result may take this part of its room. The rest is for the names and
# numbers of the result that are not shown any more: they are listed beside it.
_RESULT_RATIO = 0.6

NOTICE = f"{SYSTEM}Earlier messages were left out, they exceed the context window.]"


@dataclass(frozen=True)
class Scale:
    """Measures and shortens contents, in tokens of the model.

    A text takes bytes / 4 times a factor: the correction of the model, or the density
    of the text if that is larger. Dense texts have many tokens for their length.

    Attributes:
        correction: Tokens of the model per byte / 4.
        memo: Remembers the sizes and texts of contents.
    """

    correction: float = DEFAULT_CORRECTION
    memo: Memo = field(default_factory=Memo)

    @cached_property
    def count(self) -> TokenCounter:
        """The function that estimates a text, in tokens of the model."""
        return token_counter(self.correction)

    def measure(self, contents: Iterable[types.Content]) -> int:
        """Estimates contents, in tokens of the model."""
        tokens = 0
        for content in contents:
            for part in parts_of(content):
                density = estimate_text_density(self.memo.part_text(part))
                heuristic_tokens = self.memo.part_bytes(part) / 4
                tokens += math.ceil(heuristic_tokens * max(self.correction, density))
        return tokens

    def shorten(self, content: types.Content, max_tokens: float) -> types.Content:
        """Shortens the texts and results of a content, each by the same ratio.

        Calls and media stay as they are, so the copy may take more than `max_tokens`.
        Returns the content itself if it fits.
        """
        tokens = self.measure([content])
        if tokens <= max_tokens:
            return content

        ratio = max_tokens / tokens * _SHORTENED_RATIO
        parts = [self._shorten_part(part, ratio) for part in parts_of(content)]
        return content.model_copy(update={"parts": parts})

    def _shorten_part(self, part: types.Part, ratio: float) -> types.Part:
        """Returns a part with a shortened text or result; other parts stay."""
        if part.text:
            text = quote(part.text)
            shortened = shorten_to_tokens(text, self.count(text) * ratio, self.count)
            # A part without any text would be refused.
            return part.model_copy(update={"text": shortened or "…"})

        response = part.function_response
        if response is not None and response.response:
            short_response = self._shorten_response(response, response.response, ratio)
            return part.model_copy(update={"function_response": short_response})
        return part

    def _shorten_response(
        self, response: types.FunctionResponse, result: dict[str, Any], ratio: float
    ) -> types.FunctionResponse:
        """Returns the response of a tool with a shortened result.

        For example, `{"rows": "a long text"}` becomes `{"result": '{"rows":"a … t"}'}`.
        Names and numbers that are not shown any more are added.
        """
        text = quote(payload_text(result))
        max_tokens = self.count(text) * ratio * _RESULT_RATIO
        shortened = shorten_to_tokens(text, max_tokens, self.count)
        names_bytes = len(shortened) // 4
        named = name_rest(list_names(result), {"result": shortened}, names_bytes)
        return response.model_copy(update={"response": named})


@dataclass(frozen=True)
class Frame:
    """The parts of a list of contents that is to be cut.

    Attributes:
        request_index: The index of the user's request; None if it is unknown, or if the
            head quotes the request.
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
    if scale is None:
        scale = Scale()
    if frame is None:
        frame = _guess_frame(contents)
    beginning = _begin(frame.head, calls_text="")
    if scale.measure([*beginning, *contents]) <= room_tokens:
        return join_messages(beginning, contents)

    # An agent repeats calls that it does not see, so the calls that are left out are
    # listed. How many are left out depends on the room that their list leaves. So the
    # list gets the room of a list of all calls.
    max_list_tokens = int(room_tokens * _CALLS_RATIO)
    full_list = tell_left_out(
        contents, frame.running_turn, max_list_tokens, scale.count, scale.memo
    )
    list_tokens = scale.count(full_list)
    left_tokens = room_tokens - list_tokens - scale.measure(beginning)

    kept: dict[int, types.Content] = {}
    if frame.request_index is not None:
        request = contents[frame.request_index]
        request_tokens = (room_tokens - list_tokens) * _REQUEST_RATIO
        kept[frame.request_index] = scale.shorten(request, request_tokens)
        left_tokens -= scale.measure(kept.values())
    kept |= _keep_newest(contents, frame.request_index, left_tokens, scale)

    left_out = [index for index in frame.running_turn if index not in kept]
    calls_text = tell_left_out(contents, left_out, list_tokens, scale.count, scale.memo)
    newest_last = [kept[index] for index in sorted(kept)]
    return join_messages(_begin(frame.head, calls_text), newest_last)


def _begin(head: Sequence[types.Content], calls_text: str) -> list[types.Content]:
    """Returns the beginning of a cut list.

    Args:
        head: The message with the summary; empty for a notice in its place.
        calls_text: The list of the calls that are left out; "" for none.
    """
    if not head:
        notice = f"{NOTICE}\n\n{calls_text}" if calls_text else NOTICE
        return [types.UserContent(notice)]
    return [*head, types.UserContent(calls_text)] if calls_text else [*head]


def _guess_frame(contents: Sequence[types.Content]) -> Frame:
    """Returns a frame without a head, whose request is the user's newest message."""
    request_index = _find_newest_message(contents)
    turn_start = 0 if request_index is None else request_index + 1
    return Frame(request_index, range(turn_start, len(contents)))


def _find_newest_message(contents: Sequence[types.Content]) -> int | None:
    """Returns the index of the user's newest message; None if there is none."""
    indexes = [index for index, content in enumerate(contents) if is_user_text(content)]
    return indexes[-1] if indexes else None


def _keep_newest(
    contents: Sequence[types.Content],
    request_index: int | None,
    room_tokens: int,
    scale: Scale,
) -> dict[int, types.Content]:
    """Returns the newest contents that fit, by index; splits no call from its result.

    If the newest group of calls and results does not fit whole, it is shortened.

    Args:
        contents: All contents.
        request_index: The index of the user's request, which has its own room and is
            left out here; None for none.
        room_tokens: The most tokens of the result.
        scale: Measures contents.
    """
    # A cut before an index of `cuts` splits no call from its result. The contents from
    # one cut to the next are a group.
    may_cut = pair_boundaries(contents)
    cuts = [index for index in range(len(contents) + 1) if may_cut[index]]
    groups = list(itertools.pairwise(cuts))

    kept: dict[int, types.Content] = {}
    left_tokens = room_tokens
    for start, end in reversed(groups):
        indexes = [index for index in range(start, end) if index != request_index]
        group = {index: contents[index] for index in indexes}
        group_tokens = scale.measure(group.values())
        # A group of the request alone is empty, and fits even without any room.
        fits = not group or group_tokens <= left_tokens
        if fits:
            kept |= group
            left_tokens -= group_tokens
            continue

        is_newest_group = end == len(contents)
        if is_newest_group:
            kept |= _shorten_group(group, left_tokens, scale)
        break
    return kept


def _shorten_group(
    group: Mapping[int, types.Content], room_tokens: int, scale: Scale
) -> Mapping[int, types.Content]:
    """Returns contents that are shortened by one ratio; {} if they still do not fit.

    Args:
        group: The contents, by index.
        room_tokens: The most tokens of the result; below 0 if there is no room.
        scale: Measures contents.
    """
    ratio = max(0.0, room_tokens) / scale.measure(group.values())
    shortened = {
        index: scale.shorten(content, scale.measure([content]) * ratio)
        for index, content in group.items()
    }
    fits = scale.measure(shortened.values()) <= room_tokens
    return shortened if fits else {}


def minimize(turn: Turn, room_tokens: int, correction: float) -> list[types.Content]:
    """Returns only the summary, the user's request and the newest contents that fit.

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
    # A shape would put these contents in order anyway. But after a refusal of their
    # form, the last content is named by its fingerprint, so it must not change later.
    return put_in_order(reduced, turn.media_mover)


class _Head(NamedTuple):
    """The message with the summary, and the shortened summary that it has."""

    stored: StoredSummary
    content: types.Content


def _render_short_head(
    turn: Turn, max_tokens: float, correction: float
) -> _Head | None:
    """Returns the message with the summary, as short as it has to be.

    Returns:
        The longest message that fits, else the shortest one if it has no summary, but
        only sections such as pinned texts. Otherwise None.
    """
    history = turn.history
    head: _Head | None = None
    for stored in shorten_stored(turn, history.stored):
        content = render_head(history, stored, history.covered, turn.media_mover)
        head = _Head(stored, content)
        if history.memo.estimate_tokens([content]) * correction <= max_tokens:
            return head

    has_summary = head is not None and head.stored.text != ""
    return None if has_summary else head


def _find_unquoted_request(turn: Turn, head: _Head | None) -> int | None:
    """Returns the index of the user's request; None if the head quotes the request.

    Args:
        turn: The model call.
        head: The message with the summary; None if there is none.
    """
    history = turn.history
    request_index = history.request_index
    if head is None and request_index is None:
        # The history does not tell the request, so it is the newest message.
        return _find_newest_message(history.shown)
    if head is None:
        return request_index

    if request_index is None or not head.stored.has_continuation:
        # Only a continuation quotes the request.
        return request_index
    is_quoted = head.stored.request == history.fingerprint(request_index).hex()
    return None if is_quoted else request_index


def cut_request(request: LlmRequest, max_tokens: int, llm: object) -> None:
    """Cuts the contents of a request that does not fit; needs no session state.

    Args:
        request: The request, which is changed.
        max_tokens: The most tokens of contents, instruction and tools together.
        llm: The client of the model; None if it is unknown.
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
    # ADK's cache metadata describe a prefix of the contents that is gone.
    request.cache_metadata = None
