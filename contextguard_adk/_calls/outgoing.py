"""The last steps before a request leaves: what its provider refuses apart from length.

A refusal whose words are known is answered once for each kind and request. What has
helped is kept in session state, so that later requests begin with the same bytes.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from google.genai import types

from contextguard_adk._history.coverage import fingerprint
from contextguard_adk._history.pairs import (
    find_running_turn,
    has_function_response,
    is_message,
    media_parts,
    parts_of,
    result_media,
)
from contextguard_adk._history.rendering import join_messages, mend_contents
from contextguard_adk._history.thoughts import (
    SealedRequest,
    Thinker,
    fit_claude,
    leave_out_thoughts,
    newest_thoughts,
)
from contextguard_adk._measuring.tokens import part_text
from contextguard_adk._providers.retry import read_status
from contextguard_adk._summarizing.items import leave_out_media
from contextguard_adk._summarizing.transcript import render_entries
from contextguard_adk.telemetry import warn_once

if TYPE_CHECKING:
    from google.adk.events.event import Event

    from contextguard_adk._calls.limits import Limits
    from contextguard_adk._measuring.tokens import Memo

logger = logging.getLogger("contextguard_adk.outgoing")

_WORDS = {
    "binding": r"bound to a different conversation",
    "thoughts": r"Invalid `?(signature|data)`? in `?(redacted_)?thinking`?|cannot be "
    r"thinking|cannot contain thinking|must contain thinking",
    "turn": r"in the latest assistant message cannot be modified|Expected `?thinking`?"
    r"|must start with a thinking block",
    "signatures": r"missing a `?thought_signature|Corrupted thought signature|"
    r"Thought signature is not valid",
    "reasoning": r"in the thinking mode must be passed back|reasoning_content`? is "
    r"missing|Missing `?reasoning_content",
    "shape": r"first message must use the|must start with a user message|roles must "
    r"alternate|unexpected `?tool_use_id`? found|ids were found without|function call "
    r"turn comes immediately after|function response parts is equal|must include at "
    r"least one parts field|contents is not specified|must be a response to a prec|"
    r"must be followed by tool messages|Expected last role|Unexpected role|same number "
    r"of function calls|toolConfig field must be|must define tools|text content blocks "
    r"must be non-empty|assistant message prefill",
}
_KINDS = {kind: re.compile(words) for kind, words in _WORDS.items()}
_SIGNING = re.compile(r"gemini-([3-9]|\d\d)")  # Wants its calls signed.
_DUMMY_SIGNATURE = b"skip_thought_signature_validator"
"""Gemini's documented signature for calls that another model has made."""


class Outgoing:
    """Gives the contents of one call the form that its provider accepts."""

    def __init__(self, limits: Limits, events: Sequence[Event], memo: Memo) -> None:
        self._limits = limits
        self._events = events
        self._memo = memo
        self.sealed: SealedRequest | None = None

    @property
    def helped(self) -> dict[str, str]:
        """What helped where the provider refused a history of this session."""
        return self._limits.state.record.helped or {}

    @property
    def thinker(self) -> Thinker:
        """The model, as far as its thoughts are concerned."""
        limits, helped = self._limits, self.helped
        binds = limits.strategy.binds_thoughts
        if binds is None and limits.model in (helped.get("binds"), helped.get("free")):
            binds = limits.model == helped.get("binds")
        return Thinker.of(limits.llm, limits.model, binds)

    def shape(
        self, contents: list[types.Content], is_changed: bool = True
    ) -> list[types.Content]:
        """Returns the contents to send; `is_changed` where the guard changed them."""
        limits, thinker, helped = self._limits, self.thinker, self.helped
        contents = leave_out_media(contents, limits.session.max_media_bytes)
        if end := _find_end(contents, helped.get("flat", "")):
            contents = _flatten(contents, end)
        if helped.get("shape"):
            contents = _take_turns(contents)
        elif thinker.client == "LiteLlm" and is_changed:
            contents = _take_turns(contents, limits.request.contents)
        end = _find_end(contents, helped.get("signed", ""))
        if end or (thinker.client == "Gemini" and _SIGNING.search(limits.model)):
            contents = _sign_calls(contents, end)
        config, gone = limits.request.config, helped.get("gone", "")
        request = SealedRequest(thinker, contents, self._memo)
        sealed = leave_out_thoughts(request, config, self._events, gone, is_changed)
        self.sealed = sealed
        return fit_claude(sealed.contents, thinker)

    def watch(self) -> None:
        """Warns once of what others change again and again: it costs all thoughts."""
        session, changed = self._limits.session, self.sealed and self.sealed.changed
        session.changed_count += bool(changed)
        if changed and session.changed_count == 2:
            message = "Agent %r: %s changed between calls, so that the thoughts of its "
            message += "model cannot be sent again. Keep what changes often out of the "
            message += "instruction, the tools and older messages."
            warn_once(logger, message, self._limits.agent, changed)

    def find_help(self, kind: str, contents: Sequence[types.Content]) -> dict[str, str]:
        """What to keep so that contents refused like these are accepted."""
        helped, model = self.helped, self._limits.model
        if kind in ("binding", "thoughts"):
            gone = newest_thoughts(contents) or helped.get("gone", "")
            binds = {"binds": model, "free": ""} if kind == "binding" else {}
            return {**helped, "gone": gone, **binds}
        if kind == "turn" and self.thinker.binds:
            return {**helped, "free": model, "binds": ""}
        if kind == "signatures":
            return {**helped, "signed": _name_end(contents)}
        if kind == "shape" and not helped.get("shape"):
            return {**helped, "shape": "in turn"}
        return {**helped, "flat": _name_end(contents)}


def parse_refusal(error: BaseException, contents: Sequence[types.Content]) -> str:
    """The kind of a provider's refusal; "" for none, or if its words are quoted."""
    if isinstance(error, UnicodeDecodeError):
        return "thoughts"  # ADK's Claude class reads a signature of another client.
    if read_status(error) not in (None, 400, 422):
        return ""
    text, parts = str(error), [p for content in contents for p in parts_of(content)]
    for kind, words in _KINDS.items():
        said = words.search(text)
        if said and not any(said[0].encode() in part_text(part) for part in parts):
            return kind
    return ""


def _name_end(contents: Sequence[types.Content]) -> str:
    """Names the newest result, or message, by fingerprint and number among equals."""
    results = (i for i, each in enumerate(contents) if has_function_response(each))
    end = max(results, default=len(contents) - 1)
    return [*_name_places(contents[: end + 1]), ""][end]


def _name_places(contents: Sequence[types.Content]) -> Iterator[str]:
    seen = Counter[str]()
    for content in contents:
        digest = fingerprint(content).hex()
        seen[digest] += 1
        yield f"{digest}.{seen[digest]}"


def _find_end(contents: Sequence[types.Content], name: str) -> int:
    """How many contents end with what `_name_end` has named; 0 if it is not there."""
    places = enumerate(_name_places(contents), 1) if name else ()
    return next((end for end, place in places if place == name), 0)


def _flatten(contents: Sequence[types.Content], end: int) -> list[types.Content]:
    """Tells the first contents in one message, with their images and files."""
    told = ["[System: The conversation so far, as text.]"]
    told += [entry.text for entry in render_entries(contents, range(end))]
    told.append("[System: Continue with the newest request of the user above.]")
    parts = [types.Part(text="\n\n".join(told))]
    for content in contents[:end]:
        results = (part.function_response for part in parts_of(content))
        media = [result_media(response) for response in results if response]
        parts += itertools.chain(media_parts(content), *media)
    message = types.Content(role="user", parts=parts)
    return join_messages([message], contents[end:])


def _take_turns(
    contents: list[types.Content], others: Sequence[types.Content] = ()
) -> list[types.Content]:
    """Makes neighbors one: messages of the user, and results of parallel calls.

    Chat templates may want user and model in turn. `others` stay apart where they were
    neighbors before.
    """
    places = {id(content): place for place, content in enumerate(others)}
    turns: list[types.Content] = []
    for content in mend_contents(contents):
        parts = [p for p in parts_of(content) if p.text != "" or p.thought_signature]
        if not parts:
            continue
        before = turns[-1] if turns else types.Content()
        were_neighbors = places.get(id(before), -2) + 1 == places.get(id(content))
        are_alike = is_message(before) == is_message(content)
        if before.role == content.role == "user" and are_alike and not were_neighbors:
            parts = [*parts_of(turns.pop()), *parts]
        is_same = len(parts) == len(content.parts or ())
        turns.append(
            content if is_same else content.model_copy(update={"parts": parts})
        )
    return turns


def _sign_calls(contents: list[types.Content], end: int) -> list[types.Content]:
    """Gives the first call of each step of the running turn a signature.

    Those before `end` were refused, so that they lose their own.
    """
    signed = list(contents)
    for index in range(find_running_turn(contents), len(contents)):
        parts = list(contents[index].parts or ())
        calls = (i for i, part in enumerate(parts) if part and part.function_call)
        if (first := next(calls, None)) is None:
            continue
        if index < end or not parts[first].thought_signature:
            update = {"thought_signature": _DUMMY_SIGNATURE}
            parts[first] = parts[first].model_copy(update=update)
            signed[index] = contents[index].model_copy(update={"parts": parts})
    return signed
