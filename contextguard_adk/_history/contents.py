"""What a request's contents are: messages, calls with results, the current request."""

from __future__ import annotations

import itertools
import logging
import operator
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.genai import types

logger = logging.getLogger("contextguard_adk.history.pairs")

_RELAYED = re.compile(r"\[[^\]\n]+\] (said:|thought:|called tool `|`)")


@dataclass(frozen=True)
class Pairs:
    """The contents on the other side of calls and answers; calls without an answer."""

    partners: dict[int, set[int]] = field(default_factory=dict)
    unanswered: list[tuple[int, types.FunctionCall]] = field(default_factory=list)

    @property
    def open_calls(self) -> set[int]:
        """The contents with calls that have no answer."""
        return {index for index, _ in self.unanswered}

    def group_of(self, index: int) -> set[int]:
        """Returns every content that must be kept or removed with `index`."""
        group: set[int] = set()
        waiting = {index}
        while waiting:
            found = waiting.pop()
            group.add(found)
            waiting |= self.partners.get(found, set()) - group
        return group


def with_parts(content: types.Content, parts: Sequence[types.Part]) -> types.Content:
    """Returns a copy with these parts; the content itself where they are its own."""
    old = content.parts or []
    if len(parts) == len(old) and all(map(operator.is_, parts, old)):
        return content
    return content.model_copy(update={"parts": [*parts]})


def has_function_response(content: types.Content) -> bool:
    return any(part.function_response for part in parts_of(content))


def has_result_of(
    content: types.Content, tools: Collection[str], shown: types.Content | None = None
) -> bool:
    """Returns whether this content carries a result of these tools, shown whole."""
    pairs = zip(parts_of(content), parts_of(shown or content), strict=True)
    results = ((part.function_response, each.function_response) for part, each in pairs)
    return any(own and own.name in tools and own == other for own, other in results)


def has_tool(content: types.Content) -> bool:
    return any(p.function_call or p.function_response for p in parts_of(content))


def is_message(content: types.Content) -> bool:
    """Whether a content is in the user's role and carries no tool's result."""
    return content.role == "user" and not has_function_response(content)


def is_user_text(content: types.Content) -> bool:
    """Returns whether a content is a message that the user wrote."""
    return is_message(content) and bool(content_text(content)) and not is_relay(content)


def join_messages(
    own: Sequence[types.Content], others: Sequence[types.Content]
) -> list[types.Content]:
    """Joins what the guard says with the messages of the user that follow it.

    Chat templates may want user and model in turn.
    """
    messages = [*itertools.takewhile(is_message, others)]
    parts = [part for content in (*own, *messages) for part in parts_of(content)]
    return [types.Content(role="user", parts=parts), *others[len(messages) :]]


def find_running_turn(contents: Sequence[types.Content]) -> int:
    """Where the steps begin that follow the newest message of the user.

    What ADK adds after a tool's result, such as a moving instruction, ends no turn.
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
    """The parts of a content; some are None where a plugin has made it."""
    return [part for part in (content and content.parts) or () if part]


def payload_of(part: types.Part) -> dict[str, Any] | None:
    """The arguments of a tool's call, or its result; None for other parts."""
    if part.function_call:
        return part.function_call.args
    return part.function_response.response if part.function_response else None


def media_parts(content: types.Content | None) -> list[types.Part]:
    """Returns the images and files that are attached to this content."""
    return [p for p in parts_of(content) if p.inline_data or p.file_data]


def result_media(response: types.FunctionResponse) -> list[types.Part]:
    """Returns the images and files of a result, each as a part of its own."""
    files = response.parts or ()
    return [types.Part.model_validate(f.model_dump(exclude_none=True)) for f in files]


def is_relay(content: types.Content) -> bool:
    """Returns whether a content looks like ADK's rendering of another agent's event."""
    parts = parts_of(content)
    if content.role != "user" or len(parts) < 2:
        return False
    opening = parts[0].text or ""
    relayed = parts[1].text
    if relayed:  # A user may begin a message with the same words.
        is_relayed = _RELAYED.match(relayed) is not None
    else:
        is_relayed = opening == "For context:" or "what another agent did" in opening
    return is_relayed and opening.startswith("For context:")


def content_text(content: types.Content | None) -> str:
    """Joins the visible text parts of a content; thoughts are left out."""
    return "\n".join(_visible_texts(content))


def _visible_texts(content: types.Content | None) -> list[str]:
    return [p.text for p in parts_of(content) if p.text and not p.thought]


def pair_contents(contents: Sequence[types.Content]) -> Pairs:
    """Links every tool call with the content that answers it."""
    pairs = Pairs()
    waiting = pairs.unanswered
    for index, content in enumerate(contents):
        for part in parts_of(content):
            if part.function_call:
                waiting.append((index, part.function_call))
            response = part.function_response
            if response and (found := take_call(waiting, response)):
                pairs.partners.setdefault(found[0], set()).add(index)
                pairs.partners.setdefault(index, set()).add(found[0])
    return pairs


def take_call(
    waiting: list[tuple[int, types.FunctionCall]], response: types.FunctionResponse
) -> tuple[int, types.FunctionCall] | None:
    """Removes the open call that a response answers from `waiting`; None if none."""
    same_name: list[int] = []
    for position, (_, call) in reversed(list(enumerate(waiting))):
        if response.id and call.id == response.id:
            return waiting.pop(position)
        if call.name == response.name and not (call.id and response.id):
            same_name.insert(0, position)
    # A call that was never answered must not take the response of a later one.
    newest = max(same_name, key=lambda position: waiting[position][0], default=None)
    return None if newest is None else waiting.pop(newest)


def keep_pairs_whole(covered: Collection[int], pairs: Pairs) -> frozenset[int]:
    """Returns the largest part of `covered` that splits no call from its response."""
    kept = set(covered)
    for index in covered:
        if index in kept and not kept.issuperset(pairs.partners.get(index, ())):
            kept -= pairs.group_of(index)
    return frozenset(kept)


def find_safe_split(contents: Sequence[types.Content], split: int) -> int:
    """Moves a cut back to a content without a tool, else on to a boundary of pairs."""
    last = len(contents) - 1
    if last < 1:
        return len(contents)
    wished = max(1, min(split, last))
    boundaries = pair_boundaries(contents)
    onwards = range(wished, last + 1)
    back = range(wished, 0, -1)
    half = max(1, wished // 2)  # Further back would give up most of the cut.
    texts = (i for i in back if i >= half and not has_tool(contents[i]))
    for index in itertools.chain(texts, onwards, back):
        if boundaries[index]:
            return index
    logger.warning("No boundary between tool calls; cutting after the first content.")
    return 1


def pair_boundaries(contents: Sequence[types.Content]) -> list[bool]:
    """Returns for every cut position, both ends included, whether it splits no pair."""
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
    """Finds the newest of these messages that says what started the invocation."""
    wanted = set(_visible_texts(user_content))
    wants_media = bool(not wanted and media_parts(user_content))
    if user_content and user_content.parts and not (wanted or wants_media):
        return None
    newest = sorted(messages, reverse=True)
    for index in (i for i in newest if is_message(contents[i])):
        content = contents[index]
        texts = _visible_texts(contents[index])
        found = media_parts(content) if wants_media else texts
        # Another plugin may have added parts.
        if wanted <= set(texts) if wanted else found and not is_relay(content):
            return index
    return None
