"""Tool results shortened: in a compaction, or from their first request on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from google.genai import types
from pydantic import Field

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import payload_of, with_parts
from contextguard_adk._history.extraction import name_hidden, read_values
from contextguard_adk._history.fingerprints import handle_of
from contextguard_adk._history.text import payload_text
from contextguard_adk._measuring.calibration import token_counter
from contextguard_adk._measuring.tokens import (
    COMPACT,
    JsonForm,
    estimate_contents_tokens,
    json_text,
    part_text,
)
from contextguard_adk._support.phrases import TRUNCATED, quote, quote_line, quote_value

HANDLE_KEY = "recall_item"
"""In a shortened result: the handle under which the whole can be read back."""

NAMES_KEY = "not_shown"
"""In a shortened result: values of the part that is left out, in their order."""

NAMES_RATIO = 0.5
MAX_NAMES_BYTES = 16_000
"""What they may take: of the part that is shown, and at most."""

Length = Annotated[int, Field(ge=0, le=2**53)]  # As session state keeps it.


@dataclass(frozen=True)
class Truncation:
    """How strings over `max_length` characters in tool results are shortened.

    A result whose JSON is over `result_length` becomes an excerpt of it; 0 for never.
    With a `max_length` of 0 nothing of a result stays but its size.
    A notice also names values of what is not shown, in half of that length. Results
    of `exclude_tools` stay as they are.
    """

    max_length: Length = 4_000
    show_truncation_notice: bool = True
    smart_truncate: bool = False
    head_length: Length = 3_000
    tail_length: Length = 1_000
    result_length: Length = 0
    exclude_tools: tuple[str, ...] = ()

    @classmethod
    def in_the_middle(cls, length: int, result_length: int) -> Self:
        """Leaves 60 % of the length from the beginning, and the rest from the end."""
        head = int(length * 0.6)
        return cls(length, True, True, head, length - head, result_length)


def truncate_content(
    content: types.Content, truncation: Truncation, whole: types.Content | None = None
) -> types.Content:
    """Shortens tool results in a copy, with the handles of what is `whole`."""
    old = content.parts or []
    handled = (whole.parts or []) if whole else [None] * len(old)
    pairs = zip(old, handled, strict=True)
    parts = [_truncate_part(part, truncation, handle) for part, handle in pairs]
    return with_parts(content, parts)


def fit_results(
    contents: Sequence[types.Content],
    most_tokens: int,
    measure: Callable[[Sequence[types.Content]], int],
    has_recall: bool,
    tools: tuple[str, ...],
) -> tuple[Truncation, int]:
    """Returns how results, but those of `tools`, are shortened to fit; their size."""
    length = 4 * estimate_contents_tokens(contents)
    while True:
        cut = replace(Truncation.in_the_middle(length, length), exclude_tools=tools)
        shown = [truncate_content(c, cut, c if has_recall else None) for c in contents]
        tokens = measure(shown)
        if tokens <= most_tokens or length <= 100:
            return cut, tokens
        length = max(100, int(length * min(0.8, most_tokens / tokens)))


def _truncate_part(
    part: types.Part,
    truncation: Truncation,
    whole: types.Part | None,
    values: Sequence[str] | None = None,
) -> types.Part:
    """Shortens a result and names `values` that are not shown, by default its own."""
    response = part.function_response if part is not None else None
    if response is None or not response.response:
        return part
    if response.name in truncation.exclude_tools:
        return part
    if truncation.max_length == 0:
        # A preview is cleared as well; what is told is the size of the whole.
        size_chars = len(payload_text(payload_of(whole or part)))
        shortened = {"result": TRUNCATED.format(0, size_chars)}
        if size_chars <= 100:  # No more than that line takes.
            return part
    else:
        shortened = _name_and_truncate(response.response, truncation, values)
        if shortened is response.response:
            return part
    if whole and response.name != RECALL_TOOL:
        shortened = {**shortened, HANDLE_KEY: handle_of(whole)}
    copied = response.model_copy(update={"response": shortened})
    return part.model_copy(update={"function_response": copied})


def _name_and_truncate(
    result: dict[str, Any], truncation: Truncation, values: Sequence[str] | None
) -> dict[str, Any]:
    shortened = _truncate_result(result, truncation)
    if shortened is result:
        return result
    # Now it holds notices, which the tool's own text must not pass for.
    shortened = _truncate_result(quote_value(result), truncation)
    if truncation.show_truncation_notice and NAMES_KEY not in result:
        max_bytes = min(MAX_NAMES_BYTES, int(truncation.max_length * NAMES_RATIO))
        values = list_names(result) if values is None else values
        named = name_rest(values, shortened, max_bytes)
        if len(payload_text(named)) < len(payload_text(result)):
            return named
    return shortened


def list_names(result: dict[str, Any]) -> list[str]:
    """The values of a result, but for texts that are values by being short alone."""
    found = read_values(result)
    return [text for text, kind in found if kind == 1 or text.isdecimal()]


def name_rest(
    values: Sequence[str], shown: dict[str, Any], max_bytes: int
) -> dict[str, Any]:
    """Adds values that a shortened result does not show, under the key for them."""
    names = name_hidden(values, payload_text(shown), max_bytes)
    return {**shown, NAMES_KEY: quote_line(names)} if names else shown


def without_names(shown: types.Content, whole: types.Content) -> types.Content:
    """Returns a content as it is shown, without values that the guard names in it."""
    if shown is whole:
        return shown
    pairs = zip(shown.parts or (), whole.parts or (), strict=True)
    return with_parts(shown, [_drop_names(*pair) for pair in pairs])


def _drop_names(part: types.Part, whole: types.Part) -> types.Part:
    response = part.function_response if part is not None else None
    shown = (response and response.response) or {}
    own = payload_of(whole) or {}
    if response is None or NAMES_KEY not in shown or NAMES_KEY in own:
        return part
    shown = {name: value for name, value in shown.items() if name != NAMES_KEY}
    copied = response.model_copy(update={"response": shown})
    return part.model_copy(update={"function_response": copied})


def _truncate_result(result: dict[str, Any], truncation: Truncation) -> dict[str, Any]:
    shortened: dict[str, Any] = truncate_value(result, truncation)
    length = truncation.result_length
    text = json_text(shortened).decode("utf-8", "surrogatepass") if length else ""
    # Strings that were shortened come with notices and keys around them.
    if len(text) <= 2 * length:
        return shortened
    return {"result": truncate_text(text, replace(truncation, max_length=length))}


def truncate_value(value: Any, truncation: Truncation, depth: int = 0) -> Any:
    """Shortens strings nested up to 100 deep; copies only what changes."""
    if isinstance(value, str):
        return truncate_text(value, truncation)
    if depth >= 100 or not isinstance(value, dict | list):
        return value
    old = list(value.values()) if isinstance(value, dict) else value
    new = [truncate_value(item, truncation, depth + 1) for item in old]
    if all(map(operator.is_, new, old)):
        return value
    return dict(zip(value, new, strict=True)) if isinstance(value, dict) else new


def truncate_text(text: str, truncation: Truncation) -> str:
    """Shortens a string that is too long, unless the notice makes it longer."""
    if len(text) <= truncation.max_length:
        return text
    head = text[: truncation.max_length]
    tail = ""
    notice = ""
    if truncation.smart_truncate:
        head = text[: truncation.head_length]
        tail = quote(text[len(text) - truncation.tail_length :])
    if truncation.show_truncation_notice:
        kept = len(head) + len(tail)
        notice = f"\n{TRUNCATED.format(kept, len(text))}\n"
    shortened = head + notice + tail
    return shortened if len(shortened) < len(text) else text


@dataclass(frozen=True)
class Preview:
    """How large tool results are shown from their first request on.

    First strings are shortened as `strings` says. Of what then takes more than
    `max_tokens`, by the density of its text, long strings become head and tail; where
    these are not what is large, the JSON of the result does. Results of `exclude_tools`
    that take at most `excluded_tokens` stay whole.
    Nothing but the result decides, so it has the same bytes in every request.
    """

    max_tokens: int | None = None
    strings: Truncation | None = None
    with_handles: bool = False
    exclude_tools: tuple[str, ...] = ()
    excluded_tokens: int = 0
    form: JsonForm = COMPACT

    def __call__(self, content: types.Content) -> types.Content | None:
        """Returns a content as the agent is shown it; None where that is all of it."""
        shown = with_parts(content, [*map(self._show, content.parts or ())])
        return None if shown is content else shown

    def fits(self, size_bytes: int) -> bool:
        """Whether a content of so many bytes is shown whole, whatever stands in it."""
        has_short_strings = not self.strings or size_bytes <= self.strings.max_length
        return has_short_strings and self._is_small(size_bytes)

    def _is_small(self, size_bytes: int) -> bool:
        # No text takes more than three tokens for four bytes.
        return self.max_tokens is None or size_bytes * 3 <= self.max_tokens * 4

    def _show(self, part: types.Part) -> types.Part:
        response = part.function_response if part is not None else None
        if response is None or not response.response or response.name == RECALL_TOOL:
            return part
        is_excluded = response.name in self.exclude_tools
        if is_excluded and self._count(part) <= self.excluded_tokens:
            return part
        short = part
        whole = part if self.with_handles else None
        if self.strings:
            short = _truncate_part(part, self.strings, whole)
        size_bytes = len(part_text(short, self.form))
        return short if self._is_small(size_bytes) else self._fit(short, whole, part)

    def _count(self, part: types.Part) -> int:
        text = part_text(part, self.form).decode("utf-8", "replace")
        return token_counter(None)(text)

    def _fit(
        self, part: types.Part, whole: types.Part | None, named: types.Part
    ) -> types.Part:
        """Cuts the long strings of a result; where that is not enough, its JSON."""
        values = list_names(payload_of(named) or {})
        part = _drop_names(part, named)
        most = self.max_tokens or 0
        shown = part
        text = part_text(part, self.form).decode("utf-8", "replace")
        whole_tokens = token_counter(None)(text)
        for is_excerpt in (False, True):
            tokens = whole_tokens
            length = len(text)
            while tokens > most and length > 100:
                # The notice, the handle and what else is in the result take some.
                length = max(100, int(length * 0.95 * most / tokens))
                result_length = length // 2 if is_excerpt else 0
                truncation = Truncation.in_the_middle(length, result_length)
                shown = _truncate_part(part, truncation, whole, values)
                if shown is part:
                    break
                tokens = self._count(shown)
            if tokens <= most:
                break
        return shown
