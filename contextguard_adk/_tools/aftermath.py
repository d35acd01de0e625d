"""Describes the parts of requests, and the later need for the removed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from google.adk.sessions import Session
from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import is_relay, parts_of
from contextguard_adk._history.text import payload_text
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._tools.recordings import RecordedCall
from contextguard_adk._tools.replaying.need import Needed, Needs
from contextguard_adk._tools.requests import Rebuilt

MAX_KINDS = 9
OTHER_RESULTS = "results of other tools"


@dataclass(frozen=True)
class Recalled:
    """A call of the recall tool, and the use of its result.

    The recall tool lets an agent search the messages that a summary has replaced.
    """

    index: int  # The place of the event with the result.
    agent: str
    asked: str
    result_chars: int
    values: list[str]  # Values in the result that later calls needed.


def count_kinds(
    rebuilt: Rebuilt, memo: Memo, fixed_tokens: int, prompt_tokens: int
) -> Counter[str]:
    """Estimates the tokens of a request by kind; their sum is `prompt_tokens`."""
    estimated = Counter({"instruction and tools": fixed_tokens})

    for content in rebuilt.messages:
        for part in parts_of(content):
            alone = types.Content(role=content.role, parts=[part])
            estimated[_name_kind(part, content.role)] += memo.estimate_tokens([alone])

    for name, text in rebuilt.beside.items():
        kind = "the summary" if name == "the summary" else "beside the summary"
        estimated[kind] += memo.estimate_tokens([types.UserContent(text)])

    scale = prompt_tokens / max(1, estimated.total())
    return Counter({kind: round(count * scale) for kind, count in estimated.items()})


def _name_kind(part: types.Part, role: str | None) -> str:
    if part.function_response:
        return f"results of {part.function_response.name}"
    if part.function_call:
        return "tool calls"
    if part.thought:
        return "thoughts"
    if not part.text:
        return "files and images"
    return "the user's messages" if role == "user" else "the model's messages"


def arrange_kinds(counted: Sequence[Counter[str]]) -> dict[str, list[int]]:
    """Returns the tokens of each kind from call to call, the largest kind first.

    Where there are more than `MAX_KINDS`, the tools with the smallest results become
    one kind.
    """
    total = sum(counted, Counter[str]())
    names = [name for name, _ in total.most_common()]

    tools = [name for name in names if name.startswith("results of ")]
    others_count = len(names) - len(tools)
    most_tools = max(0, MAX_KINDS - others_count)
    small_tools = set(tools[most_tools:])

    kinds = {
        name: [tokens[name] for tokens in counted]
        for name in names
        if name not in small_tools
    }
    if small_tools:
        kinds[OTHER_RESULTS] = [
            sum(tokens[name] for name in small_tools) for tokens in counted
        ]
    return kinds


def find_missing(
    needs: Needs, needed: Sequence[Needed], rebuilt: Rebuilt
) -> list[Needed]:
    """Finds the needed values that a rebuilt request did not hold."""
    beside = types.UserContent("\n".join(rebuilt.beside.values()) or "-")
    return needs.find_missing(needed, [*rebuilt.messages, beside])


def find_needed_later(
    needs: Needs,
    removed: Sequence[types.Content],
    later: Iterable[tuple[Sequence[Needed], Sequence[Needed]]],
) -> tuple[list[str], list[str]]:
    """Finds the values in removed messages that later calls needed.

    `later` has two lists for each later call: the values that it needed, and those of
    them that its request did not hold. Returns the values that every request held in
    another place, and the values that some request did not hold.
    """
    needed = dict[str, None]()
    missing = dict[str, None]()
    for needed_by_call, absent in later:
        absent_values = {each.value for each in absent}
        for value in find_values(needs, needed_by_call, removed):
            if value in absent_values:
                missing[value] = None
            else:
                needed[value] = None

    always_held = [value for value in needed if value not in missing]
    return always_held, list(missing)


def find_values(
    needs: Needs, wanted: Sequence[Needed], contents: Sequence[types.Content]
) -> list[str]:
    """Returns the wanted values that stand in some contents."""
    absent = needs.find_missing(wanted, contents)
    return [each.value for each in wanted if each not in absent]


def list_recalled(
    session: Session,
    needs: Needs,
    calls: Sequence[tuple[RecordedCall, Sequence[Needed]]],
) -> Iterator[Recalled]:
    """Lists the calls of `recall_history`, with the values that were needed later."""
    questions = dict[str | None, str]()
    for index, event in enumerate(session.events):
        for call in event.get_function_calls():
            questions[call.id] = payload_text(call.args or {})

        responses = event.get_function_responses()
        answers = [answer for answer in responses if answer.name == RECALL_TOOL]
        if not answers:
            continue

        later = [needed for recorded, needed in calls if recorded.index > index]
        content = event.content or types.Content()
        values = find_values(needs, list(chain.from_iterable(later)), [content])
        for answer in answers:
            yield Recalled(
                index=index,
                agent=event.author,
                asked=questions.get(answer.id, ""),
                result_chars=len(payload_text(answer.response or {})),
                values=list(dict.fromkeys(values)),
            )


def list_parts(content: types.Content | None, agent: str) -> Iterator[str]:
    """Describes each part of an agent's message in a few words, with its length."""
    author = "the user" if content and content.role == "user" else agent
    if content and is_relay(content):
        author = "another agent"

    for part in parts_of(content):
        call = part.function_call
        answer = part.function_response
        if call:
            yield f"call of {call.name}{_describe_chars(call.args)}"
        elif answer:
            yield f"result of {answer.name}{_describe_chars(answer.response)}"
        elif part.text:
            kind = "thought" if part.thought else "message"
            yield f"{kind} of {author}{_describe_chars(part.text)}"
        else:
            yield f"file or image of {author}"


def _describe_chars(value: object) -> str:
    text = value if isinstance(value, str) else str(value or "")
    return f", {len(text):,} characters"
