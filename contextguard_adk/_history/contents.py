"""Reads contents: messages, tool calls with their results, the current request.

An index is a position among the contents. A relay is a content in which ADK shows an
agent what another agent did.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from google.genai import types

from contextguard_adk._support.phrases import quote

logger = logging.getLogger("contextguard_adk.history.pairs")

_RELAYED = re.compile(r"\[[^\]\n]+\] (said:|thought:|called tool `|`)")
"""How a relayed text begins: "[planner] said:", "[planner] `search` tool returned"."""


class PlacedCall(NamedTuple):
    """A tool call, and the index of the content that has it."""

    content_index: int
    call: types.FunctionCall


@dataclass(frozen=True)
class Pairs:
    """Tells which contents have tool calls, and which have the results of these calls.

    Attributes:
        partners: The links in both directions. If content 4 has the result of a call in
            content 3, then `partners` is {3: {4}, 4: {3}}.
        open_calls: The indexes of the contents that have a call without a result.
        unanswered: The calls that have no result.
    """

    partners: dict[int, set[int]] = field(default_factory=dict)
    open_calls: frozenset[int] = frozenset()
    unanswered: list[PlacedCall] = field(default_factory=list)

    def group_of(self, index: int) -> set[int]:
        """Returns the indexes of the contents that must be kept or removed together.

        They are the content at `index`, its partners, their partners, and so on.
        """
        group: set[int] = set()
        unvisited = {index}
        while unvisited:
            member = unvisited.pop()
            group.add(member)
            unvisited |= self.partners.get(member, set()) - group
        return group


def with_parts(content: types.Content, parts: Sequence[types.Part]) -> types.Content:
    """Returns a copy of a content with other parts.

    Returns the content itself if its parts are the same objects in the same order.
    """
    own_parts = content.parts or []
    if [id(part) for part in parts] == [id(part) for part in own_parts]:
        return content
    return content.model_copy(update={"parts": [*parts]})


def has_function_response(content: types.Content) -> bool:
    """Whether a content has a tool's result."""
    return any(part.function_response for part in parts_of(content))


def has_result_of(
    content: types.Content, tools: Collection[str], shown: types.Content | None = None
) -> bool:
    """Whether the model reads a whole result of one of these tools in a content.

    Args:
        content: The content, with whole results.
        tools: The names of the tools.
        shown: The form of the content that the model reads. It has the same number of
            parts, and may have shortened results. None if the model reads `content`.
    """
    whole_parts = parts_of(content)
    shown_parts = parts_of(shown or content)
    for whole_part, shown_part in zip(whole_parts, shown_parts, strict=True):
        result = whole_part.function_response
        if result is None or result.name not in tools:
            continue
        is_shown_whole = shown_part.function_response == result
        if is_shown_whole:
            return True
    return False


def has_tool(content: types.Content) -> bool:
    """Whether a content has a tool's call or result."""
    for part in content.parts or ():
        if part and (part.function_call or part.function_response):
            return True
    return False


def is_message(content: types.Content) -> bool:
    """Whether a content is in the user's role and has no tool's result."""
    if content.role != "user":
        return False
    return not any(part.function_response for part in parts_of(content))


def is_user_text(content: types.Content) -> bool:
    """Whether a content is a message with a text that the user wrote.

    False for a relay, which is a message with a text of another agent.
    """
    return is_message(content) and bool(content_text(content)) and not is_relay(content)


def join_messages(
    own: Sequence[types.Content], others: Sequence[types.Content]
) -> list[types.Content]:
    """Joins the guard's own contents and the messages that follow into one message.

    Some chat templates refuse two messages of the user in a row.

    Args:
        own: The guard's own contents, all in the user's role.
        others: The contents after `own`. Only the messages before the first content
            that is no message are joined.

    Returns:
        The joined message, and the rest of `others`.
    """
    messages = list(itertools.takewhile(is_message, others))
    contents_after = others[len(messages) :]

    joined_parts: list[types.Part] = []
    for content in [*own, *messages]:
        joined_parts += parts_of(content)
    return [types.Content(role="user", parts=joined_parts), *contents_after]


def join_new_texts(
    contents: Sequence[types.Content], messages: Sequence[types.Content]
) -> list[types.Content]:
    """Joins the neighboring texts in each content that the guard has put together.

    Such a content has the guard's own lines beside parts of the original messages. The
    texts of these parts are quoted, so that nobody takes them for lines of the guard.

    Args:
        contents: The contents that are about to be sent.
        messages: The original messages of the request. The guard has put a content
            together if the content has the user's role and several parts, and is not
            one of the objects in `messages`.
    """
    joinable_indexes = [
        index
        for index, content in enumerate(contents)
        if content.role == "user" and len(content.parts or ()) > 1
    ]
    # Objects are compared, because a message may be equal to a content of the guard.
    new_indexes = [
        index
        for index in joinable_indexes
        if not any(contents[index] is message for message in messages)
    ]
    if not new_indexes:
        return list(contents)

    # The guard takes parts over from messages without a copy, so an `id` tells a part.
    quoted_ids = {id(part) for message in messages for part in message.parts or ()}
    joined = list(contents)
    for index in new_indexes:
        joined[index] = _join_texts(contents[index], quoted_ids)
    return joined


def _join_texts(content: types.Content, quoted_ids: Collection[int]) -> types.Content:
    """Joins the neighboring texts of a content; a text without a neighbor stays.

    Args:
        content: The content.
        quoted_ids: The `id` of each part whose text is quoted when it is joined.
    """
    joined: list[types.Part] = []
    for is_text, group in itertools.groupby(parts_of(content), _is_plain_text):
        parts = list(group)
        if is_text and len(parts) > 1:
            joined.append(_join_parts(parts, quoted_ids))
        else:
            joined += parts
    return with_parts(content, joined)


def _join_parts(parts: Iterable[types.Part], quoted_ids: Collection[int]) -> types.Part:
    """Joins texts into one part, one below the other; leaves out empty texts."""
    texts: list[str] = []
    for part in parts:
        if part.text:
            is_quoted = id(part) in quoted_ids
            texts.append(quote(part.text) if is_quoted else part.text)
    return types.Part(text="\n".join(texts))


def _is_plain_text(part: types.Part) -> bool:
    """Whether a part holds a text, and nothing else."""
    set_fields = [name for name, value in vars(part).items() if value is not None]
    return set_fields == ["text"]


def find_running_turn(contents: Sequence[types.Content]) -> int:
    """Returns the index at which the steps of the running turn begin.

    This is the index after the last message that begins a turn; 0 without such a
    message. A message between a tool's result and the model's next content begins no
    turn: ADK may have added the message, such as an instruction.
    """
    steps_start = 0
    follows_result = False
    for index, content in enumerate(contents):
        if not is_message(content):
            # A content in the user's role that is no message has a tool's result.
            follows_result = content.role == "user"
        elif not follows_result:
            steps_start = index + 1
    return steps_start


def parts_of(content: types.Content | None) -> list[types.Part]:
    """Returns the parts of a content, without the None that a plugin may put there."""
    if content is None or not content.parts:
        return []
    return [part for part in content.parts if part]


def results_of(content: types.Content) -> list[types.Part]:
    """Returns the parts of a content that have a tool's result."""
    return [part for part in content.parts or () if part and part.function_response]


def payload_of(part: types.Part) -> dict[str, Any] | None:
    """Returns the arguments of a tool's call, or its result; None for other parts."""
    if part.function_call:
        return part.function_call.args
    if part.function_response:
        return part.function_response.response
    return None


def media_parts(content: types.Content | None) -> list[types.Part]:
    """Returns the images and files that are attached to a content."""
    return [part for part in parts_of(content) if part.inline_data or part.file_data]


def result_media(response: types.FunctionResponse) -> list[types.Part]:
    """Returns the images and files of a result, each as a part of a content."""
    files = response.parts or ()
    return [
        types.Part.model_validate(file.model_dump(exclude_none=True)) for file in files
    ]


def is_relay(content: types.Content) -> bool:
    """Whether a content looks like ADK's rendering of another agent's event.

    The first part of a relay begins with "For context:". The second part is a text such
    as "[planner] said: Yes", or a file.
    """
    parts = parts_of(content)
    if content.role != "user" or len(parts) < 2:
        return False

    opening = parts[0].text or ""
    if not opening.startswith("For context:"):
        return False

    # A user may begin a message with the same words, so the second part must fit too.
    relayed_text = parts[1].text
    if relayed_text:
        return _RELAYED.match(relayed_text) is not None

    # A file names no agent. So the first part must be exactly the short opening of ADK,
    # or have words of ADK's long opening.
    return opening == "For context:" or "what another agent did" in opening


def content_text(content: types.Content | None) -> str:
    """Joins the text parts of a content, without thoughts."""
    return "\n".join(_visible_texts(content))


def _visible_texts(content: types.Content | None) -> list[str]:
    parts = parts_of(content)
    return [part.text for part in parts if part.text and not part.thought]


def pair_contents(contents: Sequence[types.Content]) -> Pairs:
    """Links each content that has a tool call with the content that has its result."""
    partners: dict[int, set[int]] = {}
    waiting_calls: list[PlacedCall] = []
    for index, content in enumerate(contents):
        for part in parts_of(content):
            if part.function_call:
                waiting_calls.append(PlacedCall(index, part.function_call))
            if not part.function_response:
                continue

            answered = take_call(waiting_calls, part.function_response)
            if answered is not None:
                call_index = answered.content_index
                partners.setdefault(call_index, set()).add(index)
                partners.setdefault(index, set()).add(call_index)

    open_indexes = frozenset(placed.content_index for placed in waiting_calls)
    return Pairs(partners, open_indexes, unanswered=waiting_calls)


def take_call(
    waiting: list[PlacedCall], response: types.FunctionResponse
) -> PlacedCall | None:
    """Removes the call that a response answers from `waiting`, and returns the call.

    The answered call has the same id as the response. If the call or the response has
    no id, it is enough that both have the same name. Returns None if no call matches.

    Args:
        waiting: The calls before the response that have no result yet, oldest first.
        response: The response, which is a tool's result.
    """
    position_by_name: int | None = None
    newest_content_index: int | None = None
    for position in reversed(range(len(waiting))):
        content_index, call = waiting[position]
        if response.id and call.id == response.id:
            return waiting.pop(position)

        has_both_ids = bool(call.id and response.id)
        if has_both_ids or call.name != response.name:
            continue
        # A call in an older content may never get a result, so a call in the newest
        # content is taken. The calls of one content get their results in order, so the
        # first of these calls is taken.
        if newest_content_index in (None, content_index):
            newest_content_index = content_index
            position_by_name = position

    if position_by_name is None:
        return None
    return waiting.pop(position_by_name)


def keep_pairs_whole(covered: Collection[int], pairs: Pairs) -> frozenset[int]:
    """Returns the covered indexes that split no call from its result.

    If one index of a group is not covered, the whole group is left out.

    Args:
        covered: The indexes that are to be covered.
        pairs: The pairs of the contents. See `Pairs.group_of` for a group.
    """
    whole = set(covered)
    for index in covered:
        partners = pairs.partners.get(index, ())
        lacks_partner = not whole.issuperset(partners)
        if index in whole and lacks_partner:
            whole -= pairs.group_of(index)

    return frozenset(whole)


def find_safe_split(contents: Sequence[types.Content], split: int) -> int:
    """Returns the index before which a list of contents is cut in two.

    The cut splits no call from its result if there is such a cut. At least one content
    is before the cut and one after the cut. These indexes are tried in order:

    1. From the wished index back to half of it: the indexes of contents without a tool.
    2. From the wished index on: all indexes.
    3. From the wished index back: all indexes.

    If every cut splits a call from its result, the result is 1. Fewer than two contents
    are not cut: then the result is the number of contents.

    Args:
        contents: The contents to cut in two.
        split: The wished index; an index out of range counts as the nearest one that
            leaves a content on each side.
    """
    if len(contents) < 2:
        return len(contents)

    last_index = len(contents) - 1
    wished_index = max(1, min(split, last_index))
    # A cut further back than half would leave most of the wished contents uncut.
    half_index = max(1, wished_index // 2)
    without_tools = (
        index
        for index in range(wished_index, half_index - 1, -1)
        if not has_tool(contents[index])
    )
    forward = range(wished_index, last_index + 1)
    backward = range(wished_index, 0, -1)

    is_boundary = pair_boundaries(contents)
    for index in itertools.chain(without_tools, forward, backward):
        if is_boundary[index]:
            return index

    logger.warning("No boundary between tool calls; cutting after the first content.")
    return 1


def pair_boundaries(contents: Sequence[types.Content]) -> list[bool]:
    """Returns for each index whether a cut before it splits no call from its result.

    The last element of the list is for a cut after the last content.
    """
    partners = pair_contents(contents).partners
    boundaries: list[bool] = []
    # The last index that is linked with a content before the cut. A cut splits no pair
    # if this index is before the cut too.
    last_partner_index = -1
    for index in range(len(contents) + 1):
        boundaries.append(last_partner_index < index)
        last_partner_index = max([last_partner_index, *partners.get(index, ())])
    return boundaries


def find_current_request(
    contents: Sequence[types.Content],
    candidates: Iterable[int],
    user_content: types.Content | None,
) -> int | None:
    """Finds the newest message that fits the content that began the invocation.

    `user_content` decides which messages fit:

    - With texts: a message that has each of these texts as a part. Another plugin may
      have added parts to the message.
    - With files but no text: a message with a file, unless it is a relay.
    - Without parts, or None: a message with a text, unless it is a relay.
    - With other parts alone, such as a tool's result: none.

    Args:
        contents: The contents of a request.
        candidates: The indexes that may be found.
        user_content: The content that began the invocation, or that a workflow gave to
            the agent's node.

    Returns:
        The index of the message; None if there is none.
    """
    wanted_texts = set(_visible_texts(user_content))
    wants_media = not wanted_texts and bool(media_parts(user_content))
    has_parts = user_content is not None and bool(user_content.parts)
    has_only_other_parts = has_parts and not wanted_texts and not wants_media
    if has_only_other_parts:
        return None

    for index in sorted(candidates, reverse=True):
        content = contents[index]
        if not is_message(content):
            continue

        if wanted_texts:
            is_found = wanted_texts.issubset(_visible_texts(content))
        elif is_relay(content):
            is_found = False
        elif wants_media:
            is_found = bool(media_parts(content))
        else:
            is_found = bool(_visible_texts(content))
        if is_found:
            return index
    return None
