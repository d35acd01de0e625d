"""Describes the parts of requests, and the later need for the removed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from google.adk.sessions import Session
from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import is_relay, parts_of
from contextguard_adk._history.text import payload_text
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._tools.recordings import RecordedCall
from contextguard_adk._tools.replaying.need import Needed, Needs
from contextguard_adk._tools.requests import Rebuilt

MAX_KINDS = 9  # The chart has ten colors, one of them for the other tools.
RESULTS_OF = "results of "
OTHER_RESULTS = "results of other tools"


@dataclass(frozen=True)
class Recalled:
    """A call of the recall tool, and the use of its result.

    The recall tool lets an agent search the messages that a summary has replaced.

    Attributes:
        index: The index of the event with the result.
        agent: The name of the agent.
        asked: The arguments of the call, as text.
        result_chars: The length of the result in characters.
        values: The values in the result that later calls needed.
    """

    index: int
    agent: str
    asked: str
    result_chars: int
    values: list[str]


def count_kinds(
    rebuilt: Rebuilt, memo: Memo, fixed_tokens: int, prompt_tokens: int
) -> Counter[str]:
    """Estimates the tokens of a request by the kind of content.

    Args:
        rebuilt: The request.
        memo: The known sizes of contents.
        fixed_tokens: The tokens of instruction and tools by bytes / 4.
        prompt_tokens: The provider's count; the tokens of all kinds are scaled to it.
    """
    estimated = Counter({"instruction and tools": fixed_tokens})

    for content in rebuilt.messages:
        for part in parts_of(content):
            alone = types.Content(role=content.role, parts=[part])
            estimated[_name_kind(part, content.role)] += memo.estimate_tokens([alone])

    if rebuilt.summary is not None:
        summary = types.UserContent(rebuilt.summary)
        estimated["the summary"] = memo.estimate_tokens([summary])
    for text in rebuilt.beside.values():
        beside = types.UserContent(text)
        estimated["beside the summary"] += memo.estimate_tokens([beside])

    scale = prompt_tokens / max(1, estimated.total())
    return Counter({kind: round(count * scale) for kind, count in estimated.items()})


def _name_kind(part: types.Part, role: str | None) -> str:
    """Returns a name for people of the kind of content that a part is."""
    if part.function_response:
        return f"{RESULTS_OF}{part.function_response.name}"
    if part.function_call:
        return "tool calls"
    if part.thought:
        return "thoughts"
    if not part.text:
        return "files and images"
    return "the user's messages" if role == "user" else "the model's messages"


def arrange_kinds(counted: Sequence[Counter[str]]) -> dict[str, list[int]]:
    """Returns the tokens of each kind from call to call, the largest kind first.

    `counted` has the tokens by kind of one call after the other. If there are more
    kinds than `MAX_KINDS`, the tools with the smallest results become one kind.
    """
    total_tokens = sum(counted, Counter[str]())
    kinds = [kind for kind, _ in total_tokens.most_common()]

    tool_kinds = [kind for kind in kinds if kind.startswith(RESULTS_OF)]
    other_count = len(kinds) - len(tool_kinds)
    most_tools = max(0, MAX_KINDS - other_count)
    joined_kinds = set(tool_kinds[most_tools:])

    tokens_by_kind = {
        kind: [tokens[kind] for tokens in counted]
        for kind in kinds
        if kind not in joined_kinds
    }
    if joined_kinds:
        tokens_by_kind[OTHER_RESULTS] = [
            sum(tokens[kind] for kind in joined_kinds) for tokens in counted
        ]
    return tokens_by_kind


def find_missing(
    needs: Needs, needed: Sequence[Needed], rebuilt: Rebuilt
) -> list[Needed]:
    """Finds the needed values that a rebuilt request did not hold."""
    # A content with an empty text is not valid.
    replacement_text = "\n".join(rebuilt.replacements.values()) or "-"
    replacement = types.UserContent(replacement_text)
    return needs.find_missing(needed, [*rebuilt.messages, replacement])


class CallNeeds(NamedTuple):
    """The values that a call needed, and those that its request did not hold."""

    needed: Sequence[Needed]
    missing: Sequence[Needed]


class RemovedNeeds(NamedTuple):
    """The values in removed messages that later calls needed.

    Attributes:
        held: The values that the request of each such call held in another place.
        missing: The values that the request of at least one such call did not hold.
    """

    held: list[str]
    missing: list[str]


def find_needed_later(
    needs: Needs, removed: Sequence[types.Content], later_calls: Iterable[CallNeeds]
) -> RemovedNeeds:
    """Finds the values in removed messages that later calls needed.

    A value counts as held only if the request of every call that needed it held it.
    """
    held_once = dict[str, None]()
    missing_once = dict[str, None]()
    for call in later_calls:
        missing_values = {each.value for each in call.missing}
        for value in find_values(needs, call.needed, removed):
            if value in missing_values:
                missing_once[value] = None
            else:
                held_once[value] = None

    always_held = [value for value in held_once if value not in missing_once]
    return RemovedNeeds(always_held, list(missing_once))


def find_values(
    needs: Needs, wanted: Sequence[Needed], contents: Sequence[types.Content]
) -> list[str]:
    """Returns the wanted values that at least one of the contents holds."""
    not_found = needs.find_missing(wanted, contents)
    return [each.value for each in wanted if each not in not_found]


def list_recalled(
    session: Session,
    needs: Needs,
    model_calls: Sequence[tuple[RecordedCall, Sequence[Needed]]],
) -> Iterator[Recalled]:
    """Yields the calls of the recall tool, with the values that were needed later.

    `model_calls` has all recorded model calls, each with the values that it needed.
    """
    arguments = dict[str | None, str]()  # By the id of the tool call.
    for index, event in enumerate(session.events):
        for tool_call in event.get_function_calls():
            arguments[tool_call.id] = payload_text(tool_call.args or {})

        responses = event.get_function_responses()
        recall_results = [each for each in responses if each.name == RECALL_TOOL]
        if not recall_results:
            continue

        needed_by_call = [needed for call, needed in model_calls if call.index > index]
        needed_later = list(chain.from_iterable(needed_by_call))
        content = event.content or types.Content()
        values = find_values(needs, needed_later, [content])
        for result in recall_results:
            yield Recalled(
                index=index,
                agent=event.author,
                asked=arguments.get(result.id, ""),
                result_chars=len(payload_text(result.response or {})),
                values=list(dict.fromkeys(values)),
            )


def list_parts(content: types.Content | None, agent: str) -> Iterator[str]:
    """Describes each part of a message in a few words, with its length.

    `agent` is the author of the message, unless its role or its text says otherwise.
    """
    author = _name_author(content, agent)
    for part in parts_of(content):
        call = part.function_call
        result = part.function_response
        if call:
            yield f"call of {call.name}{_describe_chars(call.args)}"
        elif result:
            yield f"result of {result.name}{_describe_chars(result.response)}"
        elif part.text:
            kind = "thought" if part.thought else "message"
            yield f"{kind} of {author}{_describe_chars(part.text)}"
        else:
            yield f"file or image of {author}"


def _name_author(content: types.Content | None, agent: str) -> str:
    """Returns a name for people of the author of a message."""
    if content and is_relay(content):  # ADK relays it with the role of the user.
        return "another agent"
    if content and content.role == "user":
        return "the user"
    return agent


def _describe_chars(value: object) -> str:
    """Returns the end of a description: ", 1,234 characters"."""
    text = value if isinstance(value, str) else str(value or "")
    return f", {len(text):,} characters"
