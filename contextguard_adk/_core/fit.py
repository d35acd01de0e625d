"""Cuts a list of contents to fit in a room, without a model.

A cut list has three parts, in this order:

1. The head, which is the message with the summary, or a notice if there is no head.
2. The user's request.
3. The newest contents.

All sizes are estimates, in tokens of the model. The correction is the tokens of the
model per heuristic token, which is 4 bytes.
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
from contextguard_adk._history.item_lists import as_excerpt, readable_text
from contextguard_adk._history.moved_media import MediaMover
from contextguard_adk._history.notes import NAMES_KEY, add_notes, split_notes
from contextguard_adk._history.order import put_in_order
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._history.truncation import list_names_again, name_rest
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

# The most of the room for the head, for the list of calls that are left out, and for
# the user's request. The newest contents get the rest.
_HEAD_RATIO = 0.5
_CALLS_RATIO = 0.20
_REQUEST_RATIO = 0.30

# The texts of a content are shortened to this part of the content's room. The rest is a
# reserve, because calls and media of the same content cannot be shortened.
_SHORTENED_RATIO = 0.95

# The text of a shortened result may take this part of the result's room. The rest is
# for a list of the names and numbers that the shortened text lacks.
_RESULT_RATIO = 0.6

NOTICE = f"{SYSTEM}Earlier messages were left out, they exceed the context window.]"


@dataclass(frozen=True)
class Scale:
    """Measures and shortens contents.

    The tokens of a text are its heuristic tokens times a factor: the correction of the
    model, or the density of the text if that is larger. The density is a guess of the
    tokens per heuristic token from the characters of the text.

    Attributes:
        correction: The correction of the model.
        memo: Remembers the sizes and texts of contents.
    """

    correction: float = DEFAULT_CORRECTION
    memo: Memo = field(default_factory=Memo)

    @cached_property
    def count(self) -> TokenCounter:
        """The function that estimates a text."""
        return token_counter(self.correction)

    def measure(self, contents: Iterable[types.Content]) -> int:
        """Estimates contents."""
        tokens = 0
        for content in contents:
            for part in parts_of(content):
                density = estimate_text_density(self.memo.part_text(part))
                heuristic_tokens = self.memo.part_bytes(part) / 4
                tokens += math.ceil(heuristic_tokens * max(self.correction, density))
        return tokens

    def shorten(self, content: types.Content, max_tokens: float) -> types.Content:
        """Shortens the texts and results of a content, each by the same ratio.

        Args:
            content: The content.
            max_tokens: The most tokens that the result is to take.

        Returns:
            The content itself if it fits, else a shortened copy. The copy may take more
            than `max_tokens`, because calls and media stay as they are.
        """
        tokens = self.measure([content])
        if tokens <= max_tokens:
            return content

        ratio = max_tokens / tokens * _SHORTENED_RATIO
        parts = [self._shorten_part(part, ratio) for part in parts_of(content)]
        return content.model_copy(update={"parts": parts})

    def _shorten_part(self, part: types.Part, ratio: float) -> types.Part:
        """Returns a part with a shortened text or result.

        A part that has neither is returned as it is.

        Args:
            part: The part.
            ratio: How much of the tokens of a text or a result may stay; below 1.
        """
        if part.text:
            # Where the text is cut, `shorten_to_tokens` puts a line of the guard. The
            # text must have no line that looks like one of the guard's, so the text is
            # quoted. After the cut, `quote` would change the guard's own line as well.
            text = quote(part.text)
            shortened = shorten_to_tokens(text, self.count(text) * ratio, self.count)
            # A provider would refuse a part without any text.
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
        The names and numbers that the shortened text lacks are added in a note.

        Args:
            response: The response.
            result: `response.response`, which is not empty.
            ratio: How much of the tokens of the result may stay; below 1.
        """
        # The result may be a preview, which has notes.
        bare_result, notes = split_notes(result)
        text = quote(readable_text(bare_result))
        max_tokens = self.count(text) * ratio * _RESULT_RATIO
        shortened = shorten_to_tokens(text, max_tokens, self.count)
        # The list is at most a quarter as long as the shortened text.
        names_bytes = len(shortened) // 4
        excerpt = as_excerpt(bare_result, shortened)
        values = list_names_again(bare_result, notes.pop(NAMES_KEY, ""))
        notes |= name_rest(values, excerpt, names_bytes)
        return response.model_copy(update={"response": add_notes(excerpt, notes)})


@dataclass(frozen=True)
class Frame:
    """The head of a list of contents, and the place of the user's request in the list.

    Attributes:
        request_index: The index of the user's request; None if the request is unknown,
            or if the head quotes it.
        running_turn: The indexes of the contents that follow the request.
        head: The message with the summary as the only item; empty for no head.
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

    The calls of the running turn that are left out are listed after the head, because
    an agent repeats calls that it does not see.

    Args:
        contents: The contents that are to be cut, without the head.
        room_tokens: The most tokens that the result is to take. The result may take
            more, because the head and the media of the request cannot be shortened.
        scale: Measures contents; None for a scale with the default correction.
        frame: The head, the user's request and the running turn; None if they are
            unknown. Then there is no head, and the user's newest message is the
            request.
    """
    if scale is None:
        scale = Scale()
    if frame is None:
        frame = _guess_frame(contents)

    # If all contents fit, no call is left out, and there is no list of calls.
    beginning = _begin(frame.head, calls_text="")
    if scale.measure([*beginning, *contents]) <= room_tokens:
        return join_messages(beginning, contents)

    # The room for the list of calls has to be known before it is known which calls are
    # left out. A list of all calls is the longest one that may be needed.
    max_list_tokens = int(room_tokens * _CALLS_RATIO)
    full_list = tell_left_out(
        contents, frame.running_turn, max_list_tokens, scale.count, scale.memo
    )
    list_tokens = scale.count(full_list)
    left_tokens = room_tokens - list_tokens - scale.measure(beginning)

    # The request is kept first, and gets its own part of the room.
    kept: dict[int, types.Content] = {}
    if frame.request_index is not None:
        request = contents[frame.request_index]
        request_tokens = (room_tokens - list_tokens) * _REQUEST_RATIO
        shortened_request = scale.shorten(request, request_tokens)
        kept[frame.request_index] = shortened_request
        left_tokens -= scale.measure([shortened_request])
    kept |= _keep_newest(contents, frame.request_index, left_tokens, scale)

    left_out = [index for index in frame.running_turn if index not in kept]
    calls_text = tell_left_out(contents, left_out, list_tokens, scale.count, scale.memo)
    kept_in_order = [kept[index] for index in sorted(kept)]
    return join_messages(_begin(frame.head, calls_text), kept_in_order)


def _begin(head: Sequence[types.Content], calls_text: str) -> list[types.Content]:
    """Returns the beginning of a cut list: the head or a notice, and the list of calls.

    Args:
        head: The message with the summary; empty if a notice takes its place.
        calls_text: The list of the calls that are left out; "" for no list.
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
    """Returns the newest contents that fit, by index.

    Contents are kept or left out in groups: a call stays with its result. If the newest
    group does not fit, it is shortened, and all older groups are left out. If even the
    shortened group does not fit, nothing is kept.

    Args:
        contents: All contents.
        request_index: The index of the user's request, which `reduce_contents` has kept
            already; None for no request.
        room_tokens: The most tokens of the result; below 0 if there is no room.
        scale: Measures contents.
    """
    # A cut before one of these indexes splits no call from its result. The first cut is
    # before all contents, the last cut after them. The contents between two cuts are a
    # group.
    may_cut = pair_boundaries(contents)
    cuts = [index for index in range(len(contents) + 1) if may_cut[index]]
    groups = list(itertools.pairwise(cuts))

    kept: dict[int, types.Content] = {}
    left_tokens = room_tokens
    for start, end in reversed(groups):
        indexes = [index for index in range(start, end) if index != request_index]
        group = {index: contents[index] for index in indexes}
        group_tokens = scale.measure(group.values())
        # The group is empty if the user's request is its only content. An empty group
        # fits even if `left_tokens` is below 0.
        fits = not group or group_tokens <= left_tokens
        if fits:
            kept |= group
            left_tokens -= group_tokens
            continue

        # Older groups are left out, so that no content in the middle is missing.
        is_newest_group = end == len(contents)
        if is_newest_group:
            kept |= _shorten_group(group, left_tokens, scale)
        break
    return kept


def _shorten_group(
    group: Mapping[int, types.Content], room_tokens: int, scale: Scale
) -> Mapping[int, types.Content]:
    """Shortens all contents of a group by one ratio.

    Args:
        group: The contents, by index, which take more tokens than the room.
        room_tokens: The most tokens of the result; below 0 if there is no room.
        scale: Measures contents.

    Returns:
        The shortened contents, by index; {} if they still do not fit.
    """
    if room_tokens <= 0:
        return {}

    ratio = room_tokens / scale.measure(group.values())
    shortened = {
        index: scale.shorten(content, scale.measure([content]) * ratio)
        for index, content in group.items()
    }
    fits = scale.measure(shortened.values()) <= room_tokens
    return shortened if fits else {}


def minimize(turn: Turn, room_tokens: int, correction: float) -> list[types.Content]:
    """Returns the summary, the user's request and the newest contents of a call.

    The shown contents of the history are cut by `reduce_contents`.

    Args:
        turn: The model call.
        room_tokens: The most tokens of the result.
        correction: The correction of the model.
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
    # A shape puts contents in order before they are sent. But a remedy against a
    # refusal names the last refused content by its fingerprint from before any shape.
    # The content has to have the same fingerprint after the shape. So the contents are
    # put in order here, and the shape changes nothing.
    return put_in_order(reduced, turn.media_mover)


class _Head(NamedTuple):
    """The message with the summary, and the shortened summary that it has.

    If `stored` has no text, the message has only sections that need no summary.
    """

    stored: StoredSummary
    content: types.Content


def _render_short_head(
    turn: Turn, max_tokens: float, correction: float
) -> _Head | None:
    """Returns the message with the summary, shortened only as far as necessary.

    `shorten_stored` yields the summary at ever shorter lengths. Its last item has no
    text if some sections have to be sent even without a summary.

    Returns:
        One of three outcomes:
        - The first message that takes at most `max_tokens`.
        - The last message if it has no text of a summary. Its sections are sent even if
          they take more.
        - None in all other cases. Then the summary is left out.
    """
    history = turn.history
    shortest: _Head | None = None
    for stored in shorten_stored(turn, history.stored):
        content = render_head(history, stored, history.covered, turn.media_mover)
        shortest = _Head(stored, content)
        if history.memo.estimate_tokens([content]) * correction <= max_tokens:
            return shortest

    has_text = shortest is not None and shortest.stored.text != ""
    return None if has_text else shortest


def _find_unquoted_request(turn: Turn, head: _Head | None) -> int | None:
    """Returns the index of the user's request; None if the head quotes the request.

    If the history does not know the request:

    - With a head: the result is None.
    - Without a head: the result is the index of the user's newest message, or None if
      there is no message.

    Args:
        turn: The model call.
        head: The message with the summary; None for no head.
    """
    history = turn.history
    request_index = history.request_index
    if request_index is None:
        return _find_newest_message(history.shown) if head is None else None

    # Only a continuation, which is the end of some heads, quotes a request.
    if head is None or not head.stored.has_continuation:
        return request_index
    # The quoted request may be an older one.
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

    reduced = reduce_contents(request.contents, room_tokens, scale)
    # A cut may leave the list without a message at its beginning, or a result without
    # its call. Such a result becomes a text, and so does a text file in the result. The
    # text of a file gets a tenth of the request, so that one file does not fill it.
    most_file_tokens = max_tokens // 10
    mover = MediaMover(llm, request.model or "", text_tokens=most_file_tokens)
    ordered = put_in_order(reduced, mover)
    request.contents = join_new_texts(ordered, request.contents)
    # ADK's cache metadata describe a prefix of the contents that is gone.
    request.cache_metadata = None
