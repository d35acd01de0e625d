"""What requests consist of, and which values a compaction took from later requests.

`contextguard report` shows both. A value is an id, a number, a name or a path. A model
call needs a value if the call gives the value to a tool, and if an earlier message
holds the value. If the request of the call does not hold the value, the value is
missing. `Needs` finds needed values and missing ones.
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

# The chart has ten colors, and one of them is for `OTHER_RESULTS`. The results of each
# tool are a kind. A request has at most eight other kinds (see `count_kinds`), so the
# results of at least one tool have a color of their own.
MAX_KINDS = 9
RESULTS_OF = "results of "
OTHER_RESULTS = "results of other tools"


@dataclass(frozen=True)
class Recalled:
    """A call of the recall tool, and the use of its result.

    The recall tool lets an agent search the messages that a summary has replaced.

    Attributes:
        index: The index of the event with the result, among the session's events.
        agent: The name of the agent.
        asked: The arguments of the call, as text; "" if the call is not recorded.
        result_chars: The length of the result in characters.
        values: The values in the event that later model calls needed, each value once.
            An event with several results has the same values for each result.
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

    Each kind is measured in heuristic tokens, of 4 bytes. Then all kinds are scaled by
    one factor, so that they add up to `prompt_tokens`, but for rounding.

    Args:
        rebuilt: The messages of the request, and the texts in place of older messages.
        memo: Counts heuristic tokens of contents, and remembers the counts.
        fixed_tokens: The heuristic tokens of the instruction and the tools.
        prompt_tokens: The provider's count for the whole request.
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

    divisor = max(1, estimates.total())  # The total of an empty request is 0.
    scale = prompt_tokens / divisor
    return Counter({kind: round(tokens * scale) for kind, tokens in estimates.items()})


def _name_kind(part: types.Part, role: str | None) -> str:
    """Returns the kind of a part, as the chart names the kind: "tool calls".

    `role` is the role of the content that has the part.
    """
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

    If there are more kinds than `MAX_KINDS`, the results of the tools with the smallest
    results become one kind, `OTHER_RESULTS`, which stands last.
    """
    # The sum of Counters has no kinds whose total is 0.
    total_tokens = sum(tokens_by_call, Counter[str]())
    largest_first = [kind for kind, _ in total_tokens.most_common()]

    tool_kinds = [kind for kind in largest_first if kind.startswith(RESULTS_OF)]
    other_kind_count = len(largest_first) - len(tool_kinds)
    # At least 1: see `MAX_KINDS`.
    shown_tool_count = MAX_KINDS - other_kind_count
    small_tool_kinds = set(tool_kinds[shown_tool_count:])

    arranged = dict[str, list[int]]()
    for kind in largest_first:
        if kind not in small_tool_kinds:
            # A Counter has 0 tokens for a kind that a call lacks.
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

    A request holds a value if one of its messages has the value, or one of the texts in
    place of older messages, such as the summary.
    """
    contents = list(rebuilt.messages)
    replacing_text = "\n".join(rebuilt.replacements.values())
    if replacing_text:
        contents.append(types.UserContent(replacing_text))
    return needs.find_missing(needed, contents)


class CallNeeds(NamedTuple):
    """The values that a call needed, and those that its request did not hold."""

    needed: Sequence[Needed]
    missing: Sequence[Needed]


class RemovedNeeds(NamedTuple):
    """The values in removed messages that later calls needed, each value once.

    Attributes:
        held: The values that were in the request of every call that needed them,
            although the messages were removed.
        missing: The values that the request of at least one of these calls lacked.
    """

    held: list[str]
    missing: list[str]


def find_needed_later(
    needs: Needs, removed: Sequence[types.Content], later_calls: Iterable[CallNeeds]
) -> RemovedNeeds:
    """Finds the values in removed messages that later calls needed.

    Several calls may need one value. The value is missing if at least one of their
    requests did not hold the value. The result is in the order of the calls.
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

    # Keys of a dict are in order, and each one stands once.
    ever_missing = dict.fromkeys(missing)
    always_held = [value for value in dict.fromkeys(held) if value not in ever_missing]
    return RemovedNeeds(held=always_held, missing=list(ever_missing))


def find_values(
    needs: Needs, wanted: Sequence[Needed], contents: Sequence[types.Content]
) -> list[str]:
    """Returns the wanted values that at least one of the contents holds, in order."""
    not_found = needs.find_missing(wanted, contents)
    return [each.value for each in wanted if each not in not_found]


def list_recalled(
    session: Session,
    needs: Needs,
    model_calls: Sequence[tuple[RecordedCall, Sequence[Needed]]],
) -> Iterator[Recalled]:
    """Yields the calls of the recall tool, with the values that were needed later.

    Args:
        session: The recorded session.
        needs: Finds values in contents.
        model_calls: All recorded model calls, each with the values that the call
            needed.
    """
    # By the id of a tool call, its arguments. A call stands before its result.
    arguments_by_id = dict[str | None, str]()
    for index, event in enumerate(session.events):
        for tool_call in event.get_function_calls():
            arguments_by_id[tool_call.id] = payload_text(tool_call.args or {})

        tool_results = event.get_function_responses()
        recall_results = [each for each in tool_results if each.name == RECALL_TOOL]
        if not recall_results:
            continue

        # The event has results, so its content is not None.
        content = event.content or types.Content()
        needed_later = _list_needed_after(index, model_calls)
        values = find_values(needs, needed_later, [content])
        for result in recall_results:
            yield Recalled(
                index=index,
                agent=event.author,
                asked=arguments_by_id.get(result.id, ""),
                result_chars=len(payload_text(result.response or {})),
                values=list(dict.fromkeys(values)),  # Several calls may need a value.
            )


def _list_needed_after(
    index: int, model_calls: Sequence[tuple[RecordedCall, Sequence[Needed]]]
) -> list[Needed]:
    """Returns the values that the model calls after an event needed.

    `index` is the index of the event, and `RecordedCall.index` that of a response.
    """
    needed_later = list[Needed]()
    for model_call, needed in model_calls:
        if model_call.index > index:
            needed_later.extend(needed)
    return needed_later


def list_parts(content: types.Content | None, agent: str) -> Iterator[str]:
    """Describes each part of a message: "result of search, 1,234 characters".

    Args:
        content: The message; None for a message without parts.
        agent: The author to name if the message is neither from the user nor from
            another agent.
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
    """Returns the length of a text, or of a dict as Python shows it, in words.

    "hello" -> "5 characters"; None and {} -> "0 characters"
    """
    text = str(value) if value else ""
    return f"{len(text):,} characters"
