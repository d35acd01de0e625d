"""Reads contents: messages, tool calls with their results, the current request."""

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


class PlacedCall(NamedTuple):
    """A tool call, and the index of the content that has it."""

    content_index: int
    call: types.FunctionCall


@dataclass(frozen=True)
class Pairs:
    """The tool calls of some contents, and their results.

    Attributes:
        partners: By the index of a content with calls, the indexes of the contents with
            their results. By the index of a content with results, the indexes of the
            contents with their calls.
        open_calls: The indexes of the contents with calls that have no result.
        unanswered: The calls without a result.
    """

    partners: dict[int, set[int]] = field(default_factory=dict)
    open_calls: frozenset[int] = frozenset()
    unanswered: list[PlacedCall] = field(default_factory=list)

    def group_of(self, index: int) -> set[int]:
        """Returns the indexes of all contents that calls and results link with one.

        A content and its group must be kept or removed together.
        """
        group: set[int] = set()
        unvisited = {index}
        while unvisited:
            member = unvisited.pop()
            group.add(member)
            unvisited |= self.partners.get(member, set()) - group
        return group


def with_parts(content: types.Content, parts: Sequence[types.Part]) -> types.Content:
    """Returns a copy with these parts; the content itself if it has these parts."""
    own = content.parts or []
    if [id(part) for part in parts] == [id(part) for part in own]:
        return content
    return content.model_copy(update={"parts": [*parts]})


def has_function_response(content: types.Content) -> bool:
    """Whether a content has a tool's result."""
    return any(part.function_response for part in parts_of(content))


def has_result_of(
    content: types.Content, tools: Collection[str], shown: types.Content | None = None
) -> bool:
    """Whether a content has a result of these tools that is shown whole.

    `shown` is the form of the content that the model reads; None for the same form.
    """
    parts = parts_of(content)
    shown_parts = parts_of(shown or content)
    for part, shown_part in zip(parts, shown_parts, strict=True):
        result = part.function_response
        if result and result.name in tools and result == shown_part.function_response:
            return True
    return False


def has_tool(content: types.Content) -> bool:
    """Whether a content has a tool's call or result."""
    parts = parts_of(content)
    return any(part.function_call or part.function_response for part in parts)


def is_message(content: types.Content) -> bool:
    """Whether a content is in the user's role and has no tool's result."""
    if content.role != "user":
        return False
    return not any(part.function_response for part in parts_of(content))


def is_user_text(content: types.Content) -> bool:
    """Whether a content is a message with a text that the user wrote."""
    return is_message(content) and bool(content_text(content)) and not is_relay(content)


def join_messages(
    own: Sequence[types.Content], others: Sequence[types.Content]
) -> list[types.Content]:
    """Puts the guard's own contents in one message with the user's messages after them.

    `others` are the contents after the guard's own. Some chat templates refuse two
    messages of the user in a row.
    """
    messages = list(itertools.takewhile(is_message, others))
    rest = others[len(messages) :]
    parts = [part for content in (*own, *messages) for part in parts_of(content)]
    return [types.Content(role="user", parts=parts), *rest]


def join_new_texts(
    contents: Sequence[types.Content], messages: Sequence[types.Content]
) -> list[types.Content]:
    """Joins the neighboring texts in each content that the guard has put together.

    Such a content has several parts, in the user's role, and is none of the original
    `messages`. It may hold texts of these messages. They are quoted, because the joined
    text also has lines of the guard.
    """
    indexes_with_several_parts = [
        index
        for index, content in enumerate(contents)
        if content.role == "user" and len(content.parts or ()) > 1
    ]
    new_indexes = [
        index
        for index in indexes_with_several_parts
        if not any(contents[index] is message for message in messages)
    ]
    if not new_indexes:
        return list(contents)

    quoted_ids = {id(part) for message in messages for part in message.parts or ()}
    joined = list(contents)
    for index in new_indexes:
        joined[index] = _join_texts(contents[index], quoted_ids)
    return joined


def _join_texts(content: types.Content, quoted_ids: Collection[int]) -> types.Content:
    """Joins the neighboring texts of a content; quotes the parts with these ids."""
    joined: list[types.Part] = []
    for is_text, group in itertools.groupby(parts_of(content), _is_plain_text):
        parts = list(group)
        if is_text and len(parts) > 1:
            joined.append(_join_parts(parts, quoted_ids))
        else:
            joined += parts
    return with_parts(content, joined)


def _join_parts(parts: Iterable[types.Part], quoted_ids: Collection[int]) -> types.Part:
    """Joins texts into one part; leaves out empty texts."""
    texts: list[str] = []
    for part in parts:
        text = part.text or ""
        if text and id(part) in quoted_ids:
            text = quote(text)
        if text:
            texts.append(text)
    return types.Part(text="\n".join(texts))


def _is_plain_text(part: types.Part) -> bool:
    """Whether a part holds a text, and nothing else."""
    set_fields = [name for name, value in vars(part).items() if value is not None]
    return set_fields == ["text"]


def find_running_turn(contents: Sequence[types.Content]) -> int:
    """Returns the index at which the steps after the user's newest message begin.

    After a tool's result ADK may add a content in the user's role, such as a moving
    instruction. Such a content is no message of the user: the turn goes on.
    """
    start = 0
    follows_result = False
    for index, content in enumerate(contents):
        if is_message(content):
            if not follows_result:
                start = index + 1
        else:
            follows_result = content.role == "user"
    return start


def parts_of(content: types.Content | None) -> list[types.Part]:
    """Returns the parts of a content, without the None that a plugin may put there."""
    if content is None or not content.parts:
        return []
    return [part for part in content.parts if part]


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
    """Returns the images and files of a result, each as a part of its own."""
    files = response.parts or ()
    return [types.Part.model_validate(f.model_dump(exclude_none=True)) for f in files]


def is_relay(content: types.Content) -> bool:
    """Whether a content looks like ADK's rendering of another agent's event.

    Its first part is "For context:", its second part is such as "[planner] said: Yes".
    """
    parts = parts_of(content)
    if content.role != "user" or len(parts) < 2:
        return False

    opening = parts[0].text or ""
    if not opening.startswith("For context:"):
        return False

    # A user may begin a message with the same words, so the second part counts as well.
    relayed_text = parts[1].text
    if relayed_text:
        return _RELAYED.match(relayed_text) is not None

    # A file of another agent has no text that names the agent.
    return opening == "For context:" or "what another agent did" in opening


def content_text(content: types.Content | None) -> str:
    """Joins the text parts of a content, without thoughts."""
    return "\n".join(_visible_texts(content))


def _visible_texts(content: types.Content | None) -> list[str]:
    parts = parts_of(content)
    return [part.text for part in parts if part.text and not part.thought]


def pair_contents(contents: Sequence[types.Content]) -> Pairs:
    """Links the contents with tool calls and the contents with the results of these."""
    partners: dict[int, set[int]] = {}
    waiting: list[PlacedCall] = []
    for index, content in enumerate(contents):
        for part in parts_of(content):
            if part.function_call:
                waiting.append(PlacedCall(index, part.function_call))
            if not part.function_response:
                continue

            answered = take_call(waiting, part.function_response)
            if answered is not None:
                call_index = answered.content_index
                partners.setdefault(call_index, set()).add(index)
                partners.setdefault(index, set()).add(call_index)
    open_calls = frozenset(placed.content_index for placed in waiting)
    return Pairs(partners, open_calls, unanswered=waiting)


def take_call(
    waiting: list[PlacedCall], response: types.FunctionResponse
) -> PlacedCall | None:
    """Takes the call that a response answers out of `waiting`, and returns it.

    The answered call has the same id as the response. If the call or the response has
    no id, it is enough that both have the same name. Returns None if no call matches.
    """
    same_name: list[int] = []
    for place, (_, call) in reversed(list(enumerate(waiting))):
        if response.id and call.id == response.id:
            return waiting.pop(place)
        if call.name == response.name and not (call.id and response.id):
            same_name.append(place)
    if not same_name:
        return None

    # A call that was never answered must not take the response of a later content's
    # call. Of several calls in one content, the first is answered first: `max` returns
    # the first of equal ones.
    same_name.reverse()
    place_of_call = max(same_name, key=lambda place: waiting[place].content_index)
    return waiting.pop(place_of_call)


def keep_pairs_whole(covered: Collection[int], pairs: Pairs) -> frozenset[int]:
    """Returns the largest part of `covered` that splits no call from its response."""
    kept = set(covered)
    for index in covered:
        partners = pairs.partners.get(index, ())
        if index in kept and not kept.issuperset(partners):
            kept -= pairs.group_of(index)
    return frozenset(kept)


def find_safe_split(contents: Sequence[types.Content], split: int) -> int:
    """Returns the index before which a cut splits no call from its result.

    `split` is the wished index. These indexes are tried, in this order:

    1. Before a content without a tool, from the wished index back to half of it.
    2. Before any content from the wished index on.
    3. Before any content from the wished index back.

    A single content cannot be divided: then the cut is after it. If every cut splits a
    call from its result, the cut is after the first content.
    """
    last_index = len(contents) - 1
    if last_index < 1:
        return len(contents)

    # At least one content is before the cut, and at least one is after it.
    wished_index = max(1, min(split, last_index))
    half = max(1, wished_index // 2)  # Further back would give up most of the cut.
    backward = range(wished_index, 0, -1)
    forward = range(wished_index, last_index + 1)
    before_texts = (i for i in backward if i >= half and not has_tool(contents[i]))

    boundaries = pair_boundaries(contents)
    for index in itertools.chain(before_texts, forward, backward):
        if boundaries[index]:
            return index

    logger.warning("No boundary between tool calls; cutting after the first content.")
    return 1


def pair_boundaries(contents: Sequence[types.Content]) -> list[bool]:
    """Returns for each index whether a cut before it leaves every pair whole.

    A pair is a call and its result. The list has one more element than there are
    contents: for a cut after the last one.
    """
    # A pair is open at an index if its call stands before the index, and its result at
    # the index or after it. A cut splits the pairs that are open. `changes` has the
    # number of pairs that open at an index, less the number that close there.
    changes = [0] * (len(contents) + 1)
    for index, partners in pair_contents(contents).partners.items():
        for partner in partners:
            if index < partner:
                changes[index + 1] += 1
                changes[partner + 1] -= 1
    return [open_count == 0 for open_count in itertools.accumulate(changes)]


def find_current_request(
    contents: Sequence[types.Content],
    candidates: Iterable[int],
    user_content: types.Content | None,
) -> int | None:
    """Finds the newest message with the content that began the invocation.

    `user_content` decides which message is found:

    - With texts: a message with all these texts. Another plugin may have added parts.
    - With files but no text: a message with a file, unless it is of another agent.
    - Without parts, or None: a message with a text, unless it is of another agent.
    - With other parts alone, such as a tool's result: none.

    Args:
        contents: The contents of a request.
        candidates: The indexes that may be found.
        user_content: The content that began the invocation.

    Returns:
        The index of the message; None if there is none.
    """
    wanted_texts = set(_visible_texts(user_content))
    wants_media = not wanted_texts and bool(media_parts(user_content))
    has_parts = user_content is not None and bool(user_content.parts)
    if has_parts and not wanted_texts and not wants_media:
        return None

    for index in sorted(candidates, reverse=True):
        content = contents[index]
        if not is_message(content):
            continue

        if wanted_texts:
            is_found = wanted_texts.issubset(_visible_texts(content))
        elif wants_media:
            is_found = bool(media_parts(content)) and not is_relay(content)
        else:
            is_found = bool(_visible_texts(content)) and not is_relay(content)
        if is_found:
            return index
    return None
