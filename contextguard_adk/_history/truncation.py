"""Shortens tool results: in a compaction, or from their first request on.

A handle is a short name under which the recall tool finds the whole result. Results
get one where the `whole` content or part is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from google.genai import types
from pydantic import Field

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import payload_of, with_parts
from contextguard_adk._history.extraction import TELLING, name_hidden, read_values
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
"""How much these values may take, as a part of the length that is shown."""

MAX_NAMES_BYTES = 16_000
"""How much they may take at most."""

_MIN_LENGTH = 100
"""Where a result does not fit, its strings are never made shorter than this."""

Length = Annotated[int, Field(ge=0, le=2**53)]  # As session state keeps it.


@dataclass(frozen=True)
class Truncation:
    """How strings over `max_length` characters in tool results are shortened.

    A result whose JSON is over twice `result_length` becomes an excerpt of it; 0 for
    never. With a `max_length` of 0 nothing of a result stays but its size. With
    `show_truncation_notice` a string tells how much of it is left, and the result also
    names values that are not shown, in half of `max_length`. With `smart_truncate` a
    string keeps `head_length` characters of its beginning and `tail_length` of its end.
    Results of `exclude_tools` stay as they are.
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
        head_length = int(length * 0.6)
        return cls(
            max_length=length,
            smart_truncate=True,
            head_length=head_length,
            tail_length=length - head_length,
            result_length=result_length,
        )


def truncate_content(
    content: types.Content, truncation: Truncation, whole: types.Content | None = None
) -> types.Content:
    """Shortens tool results in a copy, with the handles of the parts of `whole`."""
    parts = content.parts or []
    whole_parts = (whole.parts or []) if whole else [None] * len(parts)
    shortened = [
        _truncate_part(part, truncation, whole_part)
        for part, whole_part in zip(parts, whole_parts, strict=True)
    ]
    return with_parts(content, shortened)


def fit_results(
    contents: Sequence[types.Content],
    most_tokens: int,
    measure: Callable[[Sequence[types.Content]], int],
    has_recall: bool,
    tools: tuple[str, ...],
) -> tuple[Truncation, int]:
    """Finds how results are shortened to fit, and how many tokens all then take.

    Results of `tools` stay as they are. If nothing fits, it is the shortest form.
    """
    length = 4 * estimate_contents_tokens(contents)
    while True:
        cut = replace(Truncation.in_the_middle(length, length), exclude_tools=tools)
        shown = [
            truncate_content(content, cut, content if has_recall else None)
            for content in contents
        ]
        tokens = measure(shown)
        if tokens <= most_tokens or length <= _MIN_LENGTH:
            return cut, tokens
        length = max(_MIN_LENGTH, int(length * min(0.8, most_tokens / tokens)))


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
        # A preview is cleared as well; the notice tells the size of the whole.
        size_chars = len(payload_text(payload_of(whole or part)))
        if size_chars <= 100:  # No more than the notice takes.
            return part
        shortened = {"result": TRUNCATED.format(0, size_chars)}
    else:
        shortened = _name_and_truncate(response.response, truncation, values)
        if shortened is response.response:
            return part

    if whole and response.name != RECALL_TOOL:
        shortened = {**shortened, HANDLE_KEY: handle_of(whole)}
    return _with_response(part, response, shortened)


def _with_response(
    part: types.Part, response: types.FunctionResponse, result: dict[str, Any]
) -> types.Part:
    copied = response.model_copy(update={"response": result})
    return part.model_copy(update={"function_response": copied})


def _name_and_truncate(
    result: dict[str, Any], truncation: Truncation, values: Sequence[str] | None
) -> dict[str, Any]:
    """Shortens a result and names values in it; returns it as it is if it is short."""
    if _truncate_result(result, truncation) is result:
        return result

    # Now it holds notices, which the tool's own text must not pass for.
    shortened = _truncate_result(quote_value(result), truncation)
    if not truncation.show_truncation_notice or NAMES_KEY in result:
        return shortened

    max_bytes = min(MAX_NAMES_BYTES, int(truncation.max_length * NAMES_RATIO))
    own_values = list_names(result) if values is None else values
    named = name_rest(own_values, shortened, max_bytes)
    is_shorter = len(payload_text(named)) < len(payload_text(result))
    return named if is_shorter else shortened


def list_names(result: dict[str, Any]) -> list[str]:
    """Lists the values of a result, without texts that are only short."""
    return [
        text
        for text, telling in read_values(result)
        if telling == TELLING or text.isdecimal()
    ]


def name_rest(
    values: Sequence[str], shown: dict[str, Any], max_bytes: int
) -> dict[str, Any]:
    """Adds the values that a shortened result does not show, under `NAMES_KEY`."""
    names = name_hidden(values, payload_text(shown), max_bytes)
    return {**shown, NAMES_KEY: quote_line(names)} if names else shown


def without_names(shown: types.Content, whole: types.Content) -> types.Content:
    """Returns a shortened content without the values that the guard adds."""
    pairs = zip(shown.parts or (), whole.parts or (), strict=True)
    parts = [_drop_names(part, whole_part) for part, whole_part in pairs]
    return with_parts(shown, parts)


def _drop_names(part: types.Part, whole: types.Part) -> types.Part:
    """Leaves out the added values; a tool's own field of the same name stays."""
    response = part.function_response if part is not None else None
    if response is None or not response.response:
        return part

    own = payload_of(whole) or {}
    if NAMES_KEY not in response.response or NAMES_KEY in own:
        return part
    fields = response.response.items()
    unnamed = {name: value for name, value in fields if name != NAMES_KEY}
    return _with_response(part, response, unnamed)


def _truncate_result(result: dict[str, Any], truncation: Truncation) -> dict[str, Any]:
    """Shortens the strings of a result, then its JSON; copies only if it changes."""
    shortened: dict[str, Any] = truncate_value(result, truncation)
    length = truncation.result_length
    if length == 0:
        return shortened

    text = json_text(shortened).decode("utf-8", "surrogatepass")
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
    if [id(item) for item in new] == [id(item) for item in old]:
        return value
    return dict(zip(value, new, strict=True)) if isinstance(value, dict) else new


def truncate_text(text: str, truncation: Truncation) -> str:
    """Shortens a string that is too long, unless the notice makes it longer."""
    if len(text) <= truncation.max_length:
        return text

    if truncation.smart_truncate:
        head = text[: truncation.head_length]
        tail = quote(text[len(text) - truncation.tail_length :])
    else:
        head = text[: truncation.max_length]
        tail = ""

    notice = ""
    if truncation.show_truncation_notice:
        kept_chars = len(head) + len(tail)
        notice = f"\n{TRUNCATED.format(kept_chars, len(text))}\n"

    shortened = head + notice + tail
    return shortened if len(shortened) < len(text) else text


@dataclass(frozen=True)
class Preview:
    """How large tool results are shown from their first request on.

    First `strings` shortens the strings of a result. If the result then still takes
    more than `max_tokens`, its long strings keep only head and tail. If that is not
    enough either, its JSON keeps only head and tail. Results of `exclude_tools` stay
    whole up to `excluded_tokens`. Tokens are estimated from the text alone, so a result
    has the same bytes in every request.
    """

    max_tokens: int | None = None
    strings: Truncation | None = None
    with_handles: bool = False
    exclude_tools: tuple[str, ...] = ()
    excluded_tokens: int = 0
    form: JsonForm = COMPACT

    def __call__(self, content: types.Content) -> types.Content | None:
        """Returns the preview of a content; None if the agent is shown it whole."""
        parts = [self._show(part) for part in content.parts or ()]
        shown = with_parts(content, parts)
        return None if shown is content else shown

    def fits(self, size_bytes: int) -> bool:
        """Whether a content of so many bytes is shown whole, whatever it says."""
        has_short_strings = not self.strings or size_bytes <= self.strings.max_length
        return has_short_strings and self._is_small(size_bytes)

    def _is_small(self, size_bytes: int) -> bool:
        # No text takes more than three tokens for four bytes.
        return self.max_tokens is None or size_bytes * 3 <= self.max_tokens * 4

    def _show(self, part: types.Part) -> types.Part:
        """Returns the preview of a part; the part itself if it is shown whole."""
        response = part.function_response if part is not None else None
        if response is None or not response.response or response.name == RECALL_TOOL:
            return part

        is_excluded = response.name in self.exclude_tools
        if is_excluded and self._count(part) <= self.excluded_tokens:
            return part

        whole = part if self.with_handles else None
        short = _truncate_part(part, self.strings, whole) if self.strings else part
        size_bytes = len(part_text(short, self.form))
        if self._is_small(size_bytes):
            return short

        values = list_names(payload_of(part) or {})
        return self._fit(_drop_names(short, part), whole, values)

    def _count(self, part: types.Part) -> int:
        return token_counter(None)(self._text(part))

    def _text(self, part: types.Part) -> str:
        return part_text(part, self.form).decode("utf-8", "replace")

    def _fit(
        self, part: types.Part, whole: types.Part | None, values: Sequence[str]
    ) -> types.Part:
        """Cuts the long strings of a result; if that is not enough, its JSON."""
        text = self._text(part)
        whole_tokens = token_counter(None)(text)
        most_tokens = self.max_tokens or 0
        shown = part

        for is_excerpt in (False, True):
            length = len(text)
            tokens = whole_tokens
            while tokens > most_tokens and length > _MIN_LENGTH:
                # The notice, the handle and the other fields of the result take some.
                wished = int(length * 0.95 * most_tokens / tokens)
                length = max(_MIN_LENGTH, wished)
                result_length = length // 2 if is_excerpt else 0
                truncation = Truncation.in_the_middle(length, result_length)

                shown = _truncate_part(part, truncation, whole, values)
                if shown is part:
                    break
                tokens = self._count(shown)

            if tokens <= most_tokens:
                return shown
        return shown
