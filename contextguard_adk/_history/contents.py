"""Reads contents: messages, tool calls with their results, the current request."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.genai import types

from contextguard_adk._support.phrases import quote

logger = logging.getLogger("contextguard_adk.history.pairs")

_RELAYED = re.compile(r"\[[^\]\n]+\] (said:|thought:|called tool `|`)")


@dataclass(frozen=True)
class Pairs:
    """The tool calls of some contents, and their results.

    Attributes:
        partners: By the index of a content with calls or results, the indexes of the
            contents with the results or calls that belong to these.
        unanswered: The calls without a result, each with the index of its content.
    """

    partners: dict[int, set[int]] = field(default_factory=dict)
    unanswered: list[tuple[int, types.FunctionCall]] = field(default_factory=list)

    @property
    def open_calls(self) -> set[int]:
        """The indexes of the contents with calls that have no result."""
        return {index for index, _ in self.unanswered}

    def group_of(self, index: int) -> set[int]:
        """Returns the indexes that must be kept or removed together with this one."""
        group: set[int] = set()
        waiting = {index}
        while waiting:
            found = waiting.pop()
            group.add(found)
            waiting |= self.partners.get(found, set()) - group
        return group


def with_parts(content: types.Content, parts: Sequence[types.Part]) -> types.Content:
    """Returns a copy with these parts; the content itself where they are its own."""
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
    """Whether a content has a result of these tools that is shown whole."""
    for part, shown_part in zip(
        parts_of(content), parts_of(shown or content), strict=True
    ):
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
    """Joins the guard's own contents with the user's messages that follow them.

    Chat templates may want user and model in turn.
    """
    messages = list(itertools.takewhile(is_message, others))
    parts = [part for content in (*own, *messages) for part in parts_of(content)]
    return [types.Content(role="user", parts=parts), *others[len(messages) :]]


def join_new_texts(
    contents: Sequence[types.Content], messages: Sequence[types.Content]
) -> list[types.Content]:
    """Joins neighboring texts of the user in contents that are none of the messages.

    Texts of the messages are quoted there: each of them then stands in one text with
    lines of the guard.
    """
    mixed = [
        index
        for index, content in enumerate(contents)
        if content.role == "user" and len(content.parts or ()) > 1
    ]
    new = [i for i in mixed if not any(contents[i] is each for each in messages)]
    if not new:
        return list(contents)

    part_ids = {id(part) for message in messages for part in message.parts or ()}
    joined = list(contents)
    for index in new:
        joined[index] = _join_texts(contents[index], part_ids)
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
    texts: list[str] = []
    for part in parts:
        text = part.text or ""
        quoted = quote(text) if id(part) in quoted_ids else text
        if quoted:
            texts.append(quoted)
    return types.Part(text="\n".join(texts))


def _is_plain_text(part: types.Part) -> bool:
    """Whether a part holds a text, and nothing else."""
    given = [name for name, value in vars(part).items() if value is not None]
    return given == ["text"]


def find_running_turn(contents: Sequence[types.Content]) -> int:
    """Returns the index at which the steps after the user's newest message begin.

    ADK may add a content after a tool's result, such as a moving instruction. It does
    not end the turn.
    """
    start = 0
    is_answered = False
    for index, content in enumerate(contents):
        if not is_message(content):
            is_answered = content.role == "user"
        elif not is_answered:
            start = index + 1
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
    """Whether a content looks like ADK's rendering of another agent's event."""
    parts = parts_of(content)
    if content.role != "user" or len(parts) < 2:
        return False

    opening = parts[0].text or ""
    if not opening.startswith("For context:"):
        return False

    relayed = parts[1].text
    if relayed:  # A user may begin a message with the same words.
        return _RELAYED.match(relayed) is not None
    return opening == "For context:" or "what another agent did" in opening


def content_text(content: types.Content | None) -> str:
    """Joins the text parts of a content, without thoughts."""
    return "\n".join(_visible_texts(content))


def _visible_texts(content: types.Content | None) -> list[str]:
    parts = parts_of(content)
    return [part.text for part in parts if part.text and not part.thought]


def pair_contents(contents: Sequence[types.Content]) -> Pairs:
    """Links every tool call with the content that answers it."""
    partners: dict[int, set[int]] = {}
    waiting: list[tuple[int, types.FunctionCall]] = []
    for index, content in enumerate(contents):
        for part in parts_of(content):
            if part.function_call:
                waiting.append((index, part.function_call))
            if not part.function_response:
                continue

            answered = take_call(waiting, part.function_response)
            if answered is not None:
                call_index, _ = answered
                partners.setdefault(call_index, set()).add(index)
                partners.setdefault(index, set()).add(call_index)
    return Pairs(partners, unanswered=waiting)


def take_call(
    waiting: list[tuple[int, types.FunctionCall]], response: types.FunctionResponse
) -> tuple[int, types.FunctionCall] | None:
    """Takes the call that a response answers out of `waiting`; None if there is none.

    Each call stands there with the index of its content.
    """
    same_name: list[int] = []
    for position, (_, call) in reversed(list(enumerate(waiting))):
        if response.id and call.id == response.id:
            return waiting.pop(position)
        if call.name == response.name and not (call.id and response.id):
            same_name.append(position)
    if not same_name:
        return None

    # A call that was never answered must not take the response of a later one. Of
    # several calls in one content the first is answered first.
    same_name.reverse()
    newest = max(same_name, key=lambda position: waiting[position][0])
    return waiting.pop(newest)


def keep_pairs_whole(covered: Collection[int], pairs: Pairs) -> frozenset[int]:
    """Returns the largest part of `covered` that splits no call from its response."""
    kept = set(covered)
    for index in covered:
        if index in kept and not kept.issuperset(pairs.partners.get(index, ())):
            kept -= pairs.group_of(index)
    return frozenset(kept)


def find_safe_split(contents: Sequence[types.Content], split: int) -> int:
    """Moves a cut to a place where it splits no call from its result.

    The best place is before a content without a tool, further back; then any place
    further on, and last any place further back.
    """
    last = len(contents) - 1
    if last < 1:
        return len(contents)

    wished = max(1, min(split, last))
    half = max(1, wished // 2)  # Further back would give up most of the cut.
    back = range(wished, 0, -1)
    onwards = range(wished, last + 1)
    texts = (i for i in back if i >= half and not has_tool(contents[i]))

    boundaries = pair_boundaries(contents)
    for index in itertools.chain(texts, onwards, back):
        if boundaries[index]:
            return index

    logger.warning("No boundary between tool calls; cutting after the first content.")
    return 1


def pair_boundaries(contents: Sequence[types.Content]) -> list[bool]:
    """Tells for every place of a cut, both ends included, whether it splits no pair."""
    crossing = [0] * (len(contents) + 1)
    for index, partners in pair_contents(contents).partners.items():
        for partner in partners:
            if index < partner:
                crossing[index + 1] += 1
                crossing[partner + 1] -= 1
    return [depth == 0 for depth in itertools.accumulate(crossing)]


def find_current_request(
    contents: Sequence[types.Content],
    messages: Iterable[int],
    user_content: types.Content | None,
) -> int | None:
    """Finds the newest of these messages with the content that began the invocation.

    Without a `user_content` it is the newest text that no other agent wrote.
    """
    wanted = set(_visible_texts(user_content))
    wants_media = not wanted and bool(media_parts(user_content))
    if user_content and user_content.parts and not wanted and not wants_media:
        return None

    for index in sorted(messages, reverse=True):
        content = contents[index]
        if not is_message(content):
            continue

        if wanted:
            # Another plugin may have added parts.
            is_found = wanted.issubset(_visible_texts(content))
        else:
            said = media_parts(content) if wants_media else _visible_texts(content)
            is_found = bool(said) and not is_relay(content)
        if is_found:
            return index
    return None
