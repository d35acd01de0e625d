"""What requests were made of, and which values a compaction took from later ones.

`contextguard report` shows both. A value is an id, number, name or path in the
arguments of a tool call. The model call that made the tool call needed the value, so
its request should hold it. `Needs` finds such values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.adk.sessions import Session
from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import is_relay, parts_of
from contextguard_adk._history.text import payload_text
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._tools.recordings import RecordedCall
from contextguard_adk._tools.replaying.need import Needed, Needs
from contextguard_adk._tools.requests import Rebuilt

# The chart has ten colors: one is for `OTHER_RESULTS`. A request has at most eight
# kinds besides the results of tools.
MAX_KINDS = 9
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
        values: The values in the event that later calls needed.
    """

    index: int
    agent: str
    asked: str
    result_chars: int
    values: list[str]


def count_kinds(
    rebuilt: Rebuilt, memo: Memo, fixed_tokens: int, prompt_tokens: int
) -> Counter[str]:
    """Estimates the tokens of a request by kind, such as {"tool calls": 1_200}.

    The estimates are bytes / 4, scaled so that they add up to `prompt_tokens`.

    Args:
        rebuilt: The messages of the request, and the texts in place of older ones.
        memo: Estimates the tokens of contents, and remembers the estimates.
        fixed_tokens: The estimate for the instruction and the tools, bytes / 4.
        prompt_tokens: The real tokens of the whole request.
    """
    estimates = Counter({"instruction and tools": fixed_tokens})

    for content in rebuilt.messages:
        for part in parts_of(content):
            kind = _name_kind(part, content.role)
            part_alone = types.Content(role=content.role, parts=[part])
            estimates[kind] += memo.estimate_tokens([part_alone])

    if rebuilt.summary is not None:
        summary = types.UserContent(rebuilt.summary)
        estimates["the summary"] = memo.estimate_tokens([summary])
    for text in rebuilt.beside.values():
        section = types.UserContent(text)
        estimates["beside the summary"] += memo.estimate_tokens([section])

    total_tokens = max(1, estimates.total())  # An empty request has 0.
    scale = prompt_tokens / total_tokens
    return Counter({kind: round(tokens * scale) for kind, tokens in estimates.items()})


def _name_kind(part: types.Part, role: str | None) -> str:
    """Returns the kind of a part, as the chart names it: "tool calls", for instance."""
    if part.function_response:
        return f"{RESULTS_OF}{part.function_response.name}"
    if part.function_call:
        return "tool calls"
    if part.thought:
        return "thoughts"
    if not part.text:
        return "files and images"
    if role == "user":
        return "the user's messages"
    return "the model's messages"


def arrange_kinds(tokens_by_call: Sequence[Counter[str]]) -> dict[str, list[int]]:
    """Returns the tokens of each kind from call to call, the largest kind first.

    [{"thoughts": 10}, {"thoughts": 20}] -> {"thoughts": [10, 20]}

    If there are more kinds than `MAX_KINDS`, the tools with the smallest results become
    one kind, `OTHER_RESULTS`.
    """
    total_tokens = sum(tokens_by_call, Counter[str]())
    largest_first = [kind for kind, _ in total_tokens.most_common()]

    tool_kinds = [kind for kind in largest_first if kind.startswith(RESULTS_OF)]
    other_kinds_count = len(largest_first) - len(tool_kinds)
    own_kind_count = MAX_KINDS - other_kinds_count
    small_tool_kinds = set(tool_kinds[own_kind_count:])

    arranged = dict[str, list[int]]()
    for kind in largest_first:
        if kind not in small_tool_kinds:
            arranged[kind] = [tokens[kind] for tokens in tokens_by_call]
    if small_tool_kinds:
        arranged[OTHER_RESULTS] = [
            sum(tokens[kind] for kind in small_tool_kinds) for tokens in tokens_by_call
        ]
    return arranged


def find_missing(
    needs: Needs, needed: Sequence[Needed], rebuilt: Rebuilt
) -> list[Needed]:
    """Returns the needed values that a request did not hold.

    A text in place of older messages, such as the summary, may hold a value too.
    """
    contents = list(rebuilt.messages)
    texts = "\n".join(rebuilt.replacements.values())
    if texts:
        contents.append(types.UserContent(texts))
    return needs.find_missing(needed, contents)


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

    A value that several calls needed is missing if one of their requests did not hold
    it. Each value is returned once, in the order of the calls.
    """
    held = list[str]()
    missing = list[str]()
    for call in later_calls:
        missing_in_call = {each.value for each in call.missing}
        for value in find_values(needs, call.needed, removed):
            if value in missing_in_call:
                missing.append(value)
            else:
                held.append(value)

    ever_missing = dict.fromkeys(missing)
    always_held = [value for value in dict.fromkeys(held) if value not in ever_missing]
    return RemovedNeeds(held=always_held, missing=list(ever_missing))


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
    arguments_by_id = dict[str | None, str]()
    for index, event in enumerate(session.events):
        for tool_call in event.get_function_calls():
            arguments_by_id[tool_call.id] = payload_text(tool_call.args or {})

        tool_results = event.get_function_responses()
        recall_results = [each for each in tool_results if each.name == RECALL_TOOL]
        if not recall_results:
            continue

        content = event.content or types.Content()
        needed_later = _list_needed_after(index, model_calls)
        values = find_values(needs, needed_later, [content])
        for result in recall_results:
            yield Recalled(
                index=index,
                agent=event.author,
                asked=arguments_by_id.get(result.id, ""),
                result_chars=len(payload_text(result.response or {})),
                values=list(dict.fromkeys(values)),  # Each value once.
            )


def _list_needed_after(
    index: int, model_calls: Sequence[tuple[RecordedCall, Sequence[Needed]]]
) -> list[Needed]:
    """Returns the values that the model calls after an event needed."""
    needed_later = list[Needed]()
    for model_call, needed in model_calls:
        if model_call.index > index:
            needed_later.extend(needed)
    return needed_later


def list_parts(content: types.Content | None, agent: str) -> Iterator[str]:
    """Describes each part of a message: "result of search, 1,234 characters".

    `agent` is the author of each message that is neither from the user nor from another
    agent.
    """
    author = _name_author(content, agent)
    for part in parts_of(content):
        call = part.function_call
        result = part.function_response
        if call:
            yield f"call of {call.name}, {_count_chars(call.args)}"
        elif result:
            yield f"result of {result.name}, {_count_chars(result.response)}"
        elif part.text:
            kind = "thought" if part.thought else "message"
            yield f"{kind} of {author}, {_count_chars(part.text)}"
        else:
            yield f"file or image of {author}"


def _name_author(content: types.Content | None, agent: str) -> str:
    """Returns the author of a message: `agent`, "the user" or "another agent"."""
    # ADK relays messages of other agents with the role of the user.
    if content and is_relay(content):
        return "another agent"
    if content and content.role == "user":
        return "the user"
    return agent


def _count_chars(value: str | dict[str, Any] | None) -> str:
    """Returns the length of a text or a payload in words: "1,234 characters"."""
    text = str(value) if value else ""
    return f"{len(text):,} characters"
