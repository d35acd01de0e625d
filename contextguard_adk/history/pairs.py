"""What a request's contents are: history or not, calls with their responses.

Everything here is a pure function over `types.Content` lists; nothing is changed
in place, because parts share their payload with the stored session events.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from google.genai import types

logger = logging.getLogger("contextguard_adk.history.pairs")

OTHER_AGENT_PREFIX = "For context:"
"""How ADK opens a content that relays another agent's message."""

_RELAYED = re.compile(r"\[[^\]\n]+\] (said:|thought:|called tool `|`)")


@dataclass(frozen=True)
class Pairs:
    """Which contents belong together because calls in them were answered.

    Attributes:
        partners: For each content that holds an answered call or an answer, the
            indexes of the contents on the other side.
        open_calls: Contents with at least one call that nothing answers yet.
        orphans: Contents with a response whose call is not in the list.
    """

    partners: dict[int, set[int]] = field(default_factory=dict)
    open_calls: set[int] = field(default_factory=set)
    orphans: set[int] = field(default_factory=set)

    def group_of(self, index: int) -> set[int]:
        """Returns every content that must be kept or removed with `index`."""
        group = {index}
        waiting = [index]
        while waiting:
            for partner in self.partners.get(waiting.pop(), ()):
                if partner not in group:
                    group.add(partner)
                    waiting.append(partner)
        return group


def has_function_call(content: types.Content) -> bool:
    """Tells whether the model asks for a tool in this content."""
    return any(part and part.function_call for part in content.parts or ())


def has_function_response(content: types.Content) -> bool:
    """Tells whether this content carries a tool's result."""
    return any(part and part.function_response for part in content.parts or ())


def has_media(content: types.Content) -> bool:
    """Tells whether an image or a file is attached to this content."""
    return any(
        part and (part.inline_data or part.file_data) for part in content.parts or ()
    )


def is_relay(content: types.Content) -> bool:
    """Tells whether a content looks like ADK's rendering of another agent's event.

    A user may begin a message with the same words; ADK lets a part of its own
    follow for each thing that the other agent said or did.
    """
    parts = [part for part in content.parts or () if part]
    if content.role != "user" or len(parts) < 2:
        return False
    opening, relayed = parts[0].text or "", parts[1].text
    if not opening.startswith(OTHER_AGENT_PREFIX):
        return False
    if relayed:
        return _RELAYED.match(relayed) is not None
    return opening == OTHER_AGENT_PREFIX or "what another agent did" in opening


def content_text(content: types.Content | None) -> str:
    """Joins the visible text parts of a content; thoughts are left out."""
    return "\n".join(_visible_texts(content))


def _visible_texts(content: types.Content | None) -> list[str]:
    """The text of each part that is neither empty nor a thought."""
    if content is None or not content.parts:
        return []
    return [
        part.text for part in content.parts if part and part.text and not part.thought
    ]


def pair_contents(contents: Sequence[types.Content]) -> Pairs:
    """Links every tool call with the content that answers it.

    A response is matched by id where both sides have one. ADK strips the ids it
    made itself for most models, so otherwise the newest content with an open call
    of the same name is taken, and there the first: a call that was never answered
    must not take the response of a later one.
    """
    pairs = Pairs()
    waiting: list[tuple[int, types.FunctionCall]] = []
    for index, content in enumerate(contents):
        for part in content.parts or ():
            if part is None:
                continue
            if part.function_call:
                waiting.append((index, part.function_call))
            elif part.function_response:
                found = find_call(waiting, part.function_response)
                if found is None:
                    pairs.orphans.add(index)
                    continue
                call_index = waiting.pop(found)[0]
                pairs.partners.setdefault(call_index, set()).add(index)
                pairs.partners.setdefault(index, set()).add(call_index)
    pairs.open_calls.update(index for index, _ in waiting)
    return pairs


def find_call(
    waiting: Sequence[tuple[int, types.FunctionCall]],
    response: types.FunctionResponse,
) -> int | None:
    """Finds the open call that a response answers, or None."""
    if response.id:
        for position in range(len(waiting) - 1, -1, -1):
            if waiting[position][1].id == response.id:
                return position
    found = None
    for position, (index, call) in enumerate(waiting):
        is_match = call.name == response.name and not (call.id and response.id)
        if is_match and (found is None or waiting[found][0] < index):
            found = position
    return found


def keep_pairs_whole(covered: Collection[int], pairs: Pairs) -> frozenset[int]:
    """Takes out of `covered` whatever has a partner that is not covered.

    A tool result that arrives late, or was edited, is not covered although its
    call is: both then stay in the request.

    Returns:
        The largest subset of `covered` that splits no call from its response.
    """
    kept = set(covered)
    for index in covered:
        if index in kept and index in pairs.partners:
            group = pairs.group_of(index)
            if not group <= kept:
                kept -= group
    return frozenset(kept)


def find_safe_split(
    contents: Sequence[types.Content], split: int, pairs: Pairs | None = None
) -> int:
    """Moves a cut to where it separates no call from its response.

    Walks back to the nearest content that is plain text, at most half of the way
    (further back would give up most of what the cut was made for); failing that,
    forward to the next boundary between two pairs; failing that, back to the
    nearest boundary of any kind.

    Args:
        contents: The history to cut.
        split: The wished number of contents before the cut.
        pairs: The result of `pair_contents` for `contents`; None computes it.

    Returns:
        The number of contents before the cut: at least 1 (with a warning when no
        boundary was found at all), and always less than `len(contents)` where
        there is more than one content.
    """
    last = len(contents) - 1
    if last < 1:
        return len(contents)
    pairs = pairs or pair_contents(contents)
    wished = max(1, min(split, last))
    boundaries = pair_boundaries(pairs, len(contents))
    for index in range(wished, max(1, wished // 2) - 1, -1):
        content = contents[index]
        if boundaries[index] and not (
            has_function_call(content) or has_function_response(content)
        ):
            return index
    for index in itertools.chain(range(wished, last + 1), range(wished - 1, 0, -1)):
        if boundaries[index]:
            return index
    logger.warning(
        "No boundary between tool calls found in %d contents; cutting after the "
        "first one.",
        len(contents),
    )
    return 1


def pair_boundaries(pairs: Pairs, count: int) -> list[bool]:
    """For every cut position, whether it separates no pair."""
    crossing = [0] * (count + 1)
    for index, partners in pairs.partners.items():
        for partner in partners:
            if index < partner:
                crossing[index + 1] += 1
                crossing[partner + 1] -= 1
    boundaries, depth = [], 0
    for change in crossing:
        depth += change
        boundaries.append(depth == 0)
    return boundaries


def find_live_request(
    contents: Sequence[types.Content],
    history: Iterable[int],
    user_content: types.Content | None,
) -> int | None:
    """Finds the user's message that this invocation is about.

    Args:
        contents: The contents of the request.
        history: Indexes of the contents that are session history.
        user_content: What started the invocation. One that carries only a tool
            result (a long-running tool that resumes) has no live request.

    Returns:
        The index of the newest history content with that text; without
        `user_content`, of the newest user text that is neither a tool result nor
        another agent's message. None when there is no such content.
    """
    wanted = _visible_texts(user_content)
    wants_media = bool(user_content and not wanted and has_media(user_content))
    if user_content and user_content.parts and not (wanted or wants_media):
        return None
    for index in sorted(history, reverse=True):
        content = contents[index]
        if content.role != "user" or has_function_response(content):
            continue
        texts = _visible_texts(content)
        if wants_media:
            if has_media(content) and not is_relay(content):
                return index
        elif wanted:
            # Another plugin may have added parts to the user's own.
            if set(wanted) <= set(texts):
                return index
        elif texts and not is_relay(content):
            return index
    return None
