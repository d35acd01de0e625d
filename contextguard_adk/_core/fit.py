"""Makes any list of contents fit, with nothing but the contents themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk._history.contents import (
    is_user_text,
    join_messages,
    pair_boundaries,
    parts_of,
)
from contextguard_adk._history.text import payload_text
from contextguard_adk._history.truncation import list_names, name_rest
from contextguard_adk._measuring.budgets import shorten_to_tokens
from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION, token_counter
from contextguard_adk._measuring.density import estimate_text_density
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens
from contextguard_adk._providers.clients import json_form
from contextguard_adk._shapes.moved_media import MediaMover
from contextguard_adk._shapes.one_text import join_new_texts
from contextguard_adk._shapes.repair import put_in_order
from contextguard_adk._summaries.compose import (
    render_head,
    shorten_stored,
    tell_left_out,
)
from contextguard_adk._support.phrases import SYSTEM, quote
from contextguard_adk._turn.turn import Turn

NOTICE = f"{SYSTEM}Earlier messages were left out, they exceed the context window.]"


def reduce_contents(
    contents: Sequence[types.Content],
    room_tokens: int,
    correction: float | None = None,
    head: Sequence[types.Content] = (),
    request_index: int | None = None,
    turn: Collection[int] | None = None,
    memo: Memo | None = None,
) -> list[types.Content]:
    """Keeps the head or a notice, the user's request, and the newest contents that fit.

    `request_index` is None where the head quotes the request, or where it is not known.
    Calls of the running `turn`, by default what follows the request, that are left out
    are listed.
    """
    factor = correction or DEFAULT_CORRECTION
    scale = _Scale(factor, memo or Memo())
    first = list(head) or [types.UserContent(NOTICE)]
    if scale.cost([*first, *contents]) <= room_tokens:
        return join_messages(first, contents)
    if request_index is None and not head:
        texts = (i for i, item in enumerate(contents) if is_user_text(item))
        request_index = max(texts, default=None)
    if turn is None:
        turn = range(-1 if request_index is None else request_index, len(contents))[1:]
    count = token_counter(factor)
    # Without a list of its calls the agent repeats them. That of those that are left
    # out may take no more than the list of all.
    most_tokens = int(room_tokens * 0.20)
    listed = tell_left_out(contents, turn, most_tokens, count, scale.memo)
    done_tokens = count(listed)
    room_tokens -= done_tokens
    kept: dict[int, types.Content] = {}
    if request_index is not None:
        most = room_tokens * 0.30
        kept[request_index] = scale.shorten(contents[request_index], most)
    room = room_tokens - scale.cost([*first, *kept.values()])
    boundaries = pair_boundaries(contents)
    cuts = [index for index, splits_no_pair in enumerate(boundaries) if splits_no_pair]
    for start, end in reversed(list(itertools.pairwise(cuts))):
        group = {i: contents[i] for i in range(start, end) if i not in kept}
        cost = scale.cost(group.values())
        if group and cost > room:
            if end == len(contents):
                ratio = max(0.0, room) / cost
                for i, item in group.items():
                    most = scale.cost([item]) * ratio
                    group[i] = scale.shorten(item, most)
                kept |= group if scale.cost(group.values()) <= room else {}
            break
        kept |= group
        room -= cost
    left_out = [index for index in turn if index not in kept]
    if done := tell_left_out(contents, left_out, done_tokens, count, scale.memo):
        first = [*head, types.UserContent(done if head else f"{NOTICE}\n\n{done}")]
    rest = [kept[index] for index in sorted(kept)]
    return join_messages(first, rest)


def minimize(turn: Turn, room_tokens: int, factor: float) -> list[types.Content]:
    """Returns summary, current request and the newest contents that fit."""
    history = turn.history
    head = list[types.Content]()
    mover = MediaMover.of(turn)
    short = None
    for short in shorten_stored(turn, history.stored):
        head = [render_head(history, short, history.covered, mover)]
        if history.memo.estimate_tokens(head) * factor <= room_tokens * 0.5:
            break
    else:  # A notice takes its place, but not that of sections that stand alone.
        head = [] if short and short.text else head
    request = history.request_index
    # A continuation in the head may quote it.
    if head and short and short.has_continuation and request is not None:
        is_quoted = short.request == history.fingerprint(request).hex()
        request = None if is_quoted else request
    args = factor, head, request, history.running_turn, history.memo
    return put_in_order(reduce_contents(history.shown, room_tokens, *args), mover)


def cut_request(request: LlmRequest, max_tokens: int, llm: object) -> None:
    """Cuts a request to a model that is too large, after a compaction that failed."""
    memo = Memo(form=json_form(llm))
    config_tokens = int(estimate_config_tokens(request.config) * DEFAULT_CORRECTION)
    room = max_tokens - config_tokens
    if _Scale(DEFAULT_CORRECTION, memo).cost(request.contents) > room:
        mover = MediaMover(llm, request.model or "", max_tokens // 10)
        contents = reduce_contents(request.contents, room, memo=memo)
        contents = put_in_order(contents, mover)
        request.contents = join_new_texts(contents, request.contents)
        request.cache_metadata = None  # It describes a prefix that is gone.


@dataclass(frozen=True)
class _Scale:
    """Tokens of contents, by the larger of correction and density."""

    factor: float
    memo: Memo

    def cost(self, contents: Iterable[types.Content]) -> int:
        tokens = 0
        for part in itertools.chain.from_iterable(map(parts_of, contents)):
            density = estimate_text_density(self.memo.part_text(part))
            size_bytes = self.memo.part_bytes(part)
            tokens += math.ceil(size_bytes / 4 * max(self.factor, density))
        return tokens

    def shorten(self, content: types.Content, max_tokens: float) -> types.Content:
        """Shortens texts and results of a copy; calls and media stay as they are."""
        cost = self.cost([content])
        if cost <= max_tokens:
            return content
        ratio = max_tokens / cost * 0.95
        count = token_counter(self.factor)
        parts = []
        for part in parts_of(content):
            response = part.function_response
            result = response and response.response
            text = quote(part.text or (payload_text(result) if result else ""))
            most_tokens = count(text) * ratio * (0.6 if response else 1.0)
            shortened = shorten_to_tokens(text, most_tokens, count)
            update: dict[str, object] = {}
            if part.text:
                update["text"] = shortened or "…"
            elif response and result:
                values = list_names(result)
                named = name_rest(values, {"result": shortened}, len(shortened) // 4)
                update["function_response"] = response.model_copy(
                    update={"response": named}
                )
            parts.append(part.model_copy(update=update) if update else part)
        return content.model_copy(update={"parts": parts})
