"""What requests were made of, and what calls needed of what had left them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
    """A call of the recall tool, and what its result was good for.

    `values` are those that later calls of the agent needed, and that stand in it.
    """

    index: int  # Of the event with the result.
    agent: str
    asked: str
    result_chars: int
    values: list[str]


def count_kinds(
    rebuilt: Rebuilt, memo: Memo, fixed_tokens: int, prompt_tokens: int
) -> Counter[str]:
    """Estimates the tokens of a request by kind, scaled to what was counted."""
    kinds = Counter({"instruction and tools": fixed_tokens})
    for content in rebuilt.messages:
        for part in parts_of(content):
            one = types.Content(role=content.role, parts=[part])
            kinds[_name(part, content.role)] += memo.estimate_tokens([one])
    for name, text in rebuilt.beside.items():
        kind = "the summary" if name == "the summary" else "beside the summary"
        kinds[kind] += memo.estimate_tokens([types.UserContent(text)])
    scale = prompt_tokens / max(1, kinds.total())
    return Counter({name: round(count * scale) for name, count in kinds.items()})


def _name(part: types.Part, role: str | None) -> str:
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
    """Returns the tokens of each kind from call to call; the smallest tools are one."""
    total = sum(counted, Counter[str]())
    tools = [name for name, _ in total.most_common() if name.startswith("results of ")]
    small = set(tools[max(0, MAX_KINDS - (len(total) - len(tools))) :])
    names = [name for name, _ in total.most_common() if name not in small]
    kinds = {name: [kinds[name] for kinds in counted] for name in names}
    if small:
        kinds[OTHER_RESULTS] = [sum(k[name] for name in small) for k in counted]
    return kinds


def find_missing(
    needs: Needs, needed: Sequence[Needed], rebuilt: Rebuilt
) -> list[Needed]:
    """Finds what a call needed and its request did not hold."""
    beside = types.UserContent("\n".join(rebuilt.beside.values()) or "-")
    return needs.find_missing(needed, [*rebuilt.messages, beside])


def find_needed_later(
    needs: Needs,
    removed: Sequence[types.Content],
    later: Iterable[tuple[Sequence[Needed], Sequence[Needed]]],
) -> tuple[list[str], list[str]]:
    """Finds values that later calls needed and that stood in what was removed.

    `later` has for each call what it needed and what its request did not hold. Returns
    what all the requests had in another place, and what one did not have.
    """
    needed = dict[str, None]()
    missing = dict[str, None]()
    for wanted, absent in later:
        lost = {each.value for each in absent}
        for value in find_values(needs, wanted, removed):
            (missing if value in lost else needed)[value] = None
    return [value for value in needed if value not in missing], [*missing]


def find_values(
    needs: Needs, wanted: Sequence[Needed], contents: Sequence[types.Content]
) -> list[str]:
    """Returns which of the wanted values stand in some contents."""
    absent = needs.find_missing(wanted, contents)
    return [each.value for each in wanted if each not in absent]


def list_recalled(
    session: Session,
    needs: Needs,
    calls: Sequence[tuple[RecordedCall, Sequence[Needed]]],
) -> Iterator[Recalled]:
    """Lists what `recall_history` was asked, and what it brought back."""
    asked = dict[str | None, str]()
    for index, event in enumerate(session.events):
        for call in event.get_function_calls():
            asked[call.id] = payload_text(call.args or {})
        answers = event.get_function_responses()
        for answer in (each for each in answers if each.name == RECALL_TOOL):
            later = [n for call, needed in calls if call.index > index for n in needed]
            content = event.content or types.Content()
            values = list(dict.fromkeys(find_values(needs, later, [content])))
            size = len(payload_text(answer.response or {}))
            said = asked.get(answer.id)
            yield Recalled(index, event.author, said or "", size, values)


def list_parts(content: types.Content | None, agent: str) -> Iterator[str]:
    """Says of each part of an agent's message what it is, and how long."""
    author = "the user" if content and content.role == "user" else agent
    if content and is_relay(content):
        author = "another agent"
    for part in parts_of(content):
        if call := part.function_call:
            yield f"call of {call.name}{_size(call.args)}"
        elif answer := part.function_response:
            yield f"result of {answer.name}{_size(answer.response)}"
        elif part.text:
            kind = "thought" if part.thought else "message"
            yield f"{kind} of {author}{_size(part.text)}"
        else:
            yield f"file or image of {author}"


def _size(value: object) -> str:
    text = value if isinstance(value, str) else str(value or "")
    return f", {len(text):,} characters"
