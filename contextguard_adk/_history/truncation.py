"""Shortens tool results: in a compaction, or from their first request on.

Each long string of a result becomes "<head> <notice> <tail>". A result that is still
too long becomes one such excerpt of its JSON. A notice tells how many characters of the
whole text are kept.

A shortened result may have two more fields:

- `HANDLE_KEY`: a handle, the short name under which the recall tool finds the whole
  result. There is one if the caller passes the `whole` content or part.
- `NAMES_KEY`: values of the whole result, such as ids and paths, that no longer show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, Self

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
"""The field of a shortened result for its handle."""

NAMES_KEY = "not_shown"
"""The field of a shortened result for values that are only in the omitted text."""

NAMES_RATIO = 0.5
"""The values of `NAMES_KEY` take at most this many bytes for each character of
`Truncation.max_length`.
"""

MAX_NAMES_BYTES = 16_000
"""The values of `NAMES_KEY` never take more bytes than this."""

_MIN_CHARS = 100
"""To fit a result, its strings are never made shorter than this."""

_NOTICE_CHARS = 100
"""A result that is no longer than this is not replaced by a notice of its size."""

_HEAD_RATIO = 0.6
"""The part of a shortened string that is its beginning; the rest is its end."""

_MOST_KEPT_RATIO = 0.8
"""Each attempt to fit results makes the strings shorter by a fifth at least.

Tokens do not fall as fast as characters, so smaller steps could take many attempts.
"""

_STRINGS_RATIO = 0.95
"""The part of a result that is left for its strings.

The notice, the handle and the other fields take about a twentieth.
"""

_MAX_DEPTH = 100
"""Dicts and lists that are nested deeper in a result are not shortened."""

Length = Annotated[int, Field(ge=0, le=2**53)]
"""A length in session state. Some readers of JSON are only exact up to 2**53."""


@dataclass(frozen=True)
class Truncation:
    """How the strings in tool results are shortened. All lengths are in characters.

    Attributes:
        max_length: Strings that are longer are shortened to their first `max_length`
            characters. With 0, a result is replaced by a notice of its size.
        show_truncation_notice: Whether a shortened string has a notice, and a shortened
            result the field `NAMES_KEY`.
        smart_truncate: Whether a shortened string keeps `head_length` characters of its
            beginning and `tail_length` of its end instead.
        head_length: See `smart_truncate`.
        tail_length: See `smart_truncate`.
        result_length: If the JSON of a result is more than twice as long as this, the
            JSON is shortened like a string, with this as `max_length`. With 0, no JSON
            is shortened.
        exclude_tools: The tools whose results stay as they are.
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
        """Leaves out the middle of strings, so that `length` characters stay."""
        head_length = int(length * _HEAD_RATIO)
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
    """Returns a copy with shortened tool results; the content itself if none is long.

    Args:
        content: The content, which may be a preview.
        truncation: How the results are shortened.
        whole: The same content before it was shortened, for the handles; None for no
            handles.
    """
    parts = content.parts or []
    whole_parts: Sequence[types.Part | None] = [None] * len(parts)
    if whole is not None:
        whole_parts = whole.parts or []

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
    """Finds how results must be shortened so that the contents fit.

    Args:
        contents: The contents with the results.
        most_tokens: How many tokens the contents may take.
        measure: Counts the tokens of contents.
        has_recall: Whether shortened results get a handle.
        tools: The tools whose results stay as they are.

    Returns:
        How results are shortened, and how many tokens the contents take in this form.
        If no form fits, it is the shortest one.
    """
    # A token has about four characters, so the first attempt shortens next to nothing.
    chars = 4 * estimate_contents_tokens(contents)
    while True:
        for_all_tools = Truncation.in_the_middle(chars, result_length=chars)
        truncation = replace(for_all_tools, exclude_tools=tools)
        shortened = [
            truncate_content(content, truncation, content if has_recall else None)
            for content in contents
        ]

        tokens = measure(shortened)
        is_shortest = chars <= _MIN_CHARS
        if tokens <= most_tokens or is_shortest:
            return truncation, tokens

        kept_ratio = min(_MOST_KEPT_RATIO, most_tokens / tokens)
        chars = max(_MIN_CHARS, int(chars * kept_ratio))


def _truncate_part(
    part: types.Part,
    truncation: Truncation,
    whole: types.Part | None,
    values: Sequence[str] | None = None,
) -> types.Part:
    """Returns a copy of a part with a shortened result.

    Returns the part itself if it has no result, or the result needs no shortening.

    Args:
        part: The part.
        truncation: How the result is shortened.
        whole: The part before it was shortened, for the handle of the result; None for
            no handle.
        values: The values that `NAMES_KEY` may name; None for the values of the result
            itself.
    """
    # Another plugin may put None among the parts.
    response = part.function_response if part is not None else None
    if response is None or not response.response:
        return part
    if response.name in truncation.exclude_tools:
        return part

    result = response.response
    if truncation.max_length == 0:
        # The part may be a preview, so the notice tells the size of the whole result.
        whole_result = payload_of(whole or part)
        shortened = _replace_by_notice(result, len(payload_text(whole_result)))
    else:
        shortened = _name_and_truncate(result, truncation, values)
    if shortened is result:
        return part

    # A result of the recall tool is a copy: the original has a handle already.
    if whole and response.name != RECALL_TOOL:
        with_handle = {**shortened, HANDLE_KEY: handle_of(whole)}
        return _with_response(part, response, with_handle)
    return _with_response(part, response, shortened)


def _replace_by_notice(result: dict[str, Any], size_chars: int) -> dict[str, Any]:
    """Replaces a result by a notice of its size; returns a small result itself."""
    if size_chars <= _NOTICE_CHARS:
        return result
    return {"result": TRUNCATED.format(0, size_chars)}


def _with_response(
    part: types.Part, response: types.FunctionResponse, result: dict[str, Any]
) -> types.Part:
    copied = response.model_copy(update={"response": result})
    return part.model_copy(update={"function_response": copied})


def _name_and_truncate(
    result: dict[str, Any], truncation: Truncation, values: Sequence[str] | None
) -> dict[str, Any]:
    """Shortens a result, and names values that it does not show any more.

    Returns the result itself if it needs no shortening.

    Args:
        result: The result.
        truncation: How the result is shortened.
        values: The values that may be named; None for the values of the result itself.
    """
    if _truncate_result(result, truncation) is result:
        return result

    # A shortened result has notices. The tool's own text is quoted first, so that no
    # text in it can pass for a notice.
    shortened = _truncate_result(quote_value(result), truncation)
    # The tool may have a field of this name, or the result may be a preview with names.
    has_names = NAMES_KEY in result
    if has_names or not truncation.show_truncation_notice:
        return shortened

    usual_bytes = int(truncation.max_length * NAMES_RATIO)
    max_bytes = min(MAX_NAMES_BYTES, usual_bytes)
    possible_names = list_names(result) if values is None else values
    named = name_rest(possible_names, shortened, max_bytes)

    # With the names, the result may be as long as it was before.
    is_shorter = len(payload_text(named)) < len(payload_text(result))
    return named if is_shorter else shortened


def list_names(result: dict[str, Any]) -> list[str]:
    """Lists the values of a result that look like a name or are a number.

    Texts that are values only because they are short are left out.
    """
    return [
        value
        for value, telling in read_values(result)
        if telling == TELLING or value.isdecimal()
    ]


def name_rest(
    values: Sequence[str], shown: dict[str, Any], max_bytes: int
) -> dict[str, Any]:
    """Adds values that a shortened result does not show, in the field `NAMES_KEY`.

    For example: {"result": "ab…", "not_shown": "ord-81, src/a.py"}. Returns the result
    itself if it shows all values.

    Args:
        values: The values that may be added.
        shown: The shortened result.
        max_bytes: The most bytes that the added values take.
    """
    names = name_hidden(values, payload_text(shown), max_bytes)
    return {**shown, NAMES_KEY: quote_line(names)} if names else shown


def without_names(shown: types.Content, whole: types.Content) -> types.Content:
    """Returns a shortened content without the field `NAMES_KEY` in its results.

    `whole` is the content before it was shortened.
    """
    unnamed_parts = [
        _drop_names(part, whole_part)
        for part, whole_part in zip(shown.parts or (), whole.parts or (), strict=True)
    ]
    return with_parts(shown, unnamed_parts)


def _drop_names(part: types.Part, whole: types.Part) -> types.Part:
    """Leaves out the field `NAMES_KEY` of a result, unless it is the tool's own field.

    `whole` is the part before it was shortened.
    """
    response = part.function_response if part is not None else None
    if response is None or not response.response:
        return part

    is_field_of_tool = NAMES_KEY in (payload_of(whole) or {})
    if is_field_of_tool or NAMES_KEY not in response.response:
        return part

    other_fields = dict(response.response)
    del other_fields[NAMES_KEY]
    return _with_response(part, response, other_fields)


def _truncate_result(result: dict[str, Any], truncation: Truncation) -> dict[str, Any]:
    """Shortens the strings of a result, and then its JSON if that is still too long.

    A result with shortened JSON is {"result": "<excerpt of the JSON>"}. Returns the
    result itself if nothing is too long.
    """
    short_strings: dict[str, Any] = truncate_value(result, truncation)
    excerpt_chars = truncation.result_length
    if excerpt_chars == 0:
        return short_strings

    text = json_text(short_strings).decode("utf-8", "surrogatepass")
    # Names of fields and notices stand around the strings, so the JSON may be longer.
    if len(text) <= 2 * excerpt_chars:
        return short_strings
    excerpt_settings = replace(truncation, max_length=excerpt_chars)
    return {"result": truncate_text(text, excerpt_settings)}


def truncate_value(value: Any, truncation: Truncation, depth: int = 0) -> Any:
    """Shortens the strings in a JSON value.

    Returns the value itself if no string in it is too long.

    Args:
        value: A JSON value.
        truncation: How strings are shortened.
        depth: How many dicts and lists the value is nested in.
    """
    if isinstance(value, str):
        return truncate_text(value, truncation)
    if depth >= _MAX_DEPTH or not isinstance(value, dict | list):
        return value

    items = list(value.values()) if isinstance(value, dict) else value
    new_items = [truncate_value(item, truncation, depth + 1) for item in items]
    if [id(item) for item in new_items] == [id(item) for item in items]:
        return value
    if isinstance(value, dict):
        return dict(zip(value, new_items, strict=True))
    return new_items


def truncate_text(text: str, truncation: Truncation) -> str:
    """Shortens a string that is too long to "<head> <notice> <tail>".

    Returns the string itself if it is short, or would become longer by the notice.
    """
    if len(text) <= truncation.max_length:
        return text

    head = text[: truncation.max_length]
    tail = ""
    if truncation.smart_truncate:
        head = text[: truncation.head_length]
        tail_start = len(text) - truncation.tail_length
        # The cut begins a line, which must not pass for a line of the guard.
        tail = quote(text[tail_start:])

    notice = ""
    if truncation.show_truncation_notice:
        kept_chars = len(head) + len(tail)
        notice = f"\n{TRUNCATED.format(kept_chars, len(text))}\n"

    shortened = head + notice + tail
    return shortened if len(shortened) < len(text) else text


class _Attempt(NamedTuple):
    """An attempt to shorten a result.

    Attributes:
        part: The part with the result.
        max_chars: The most characters of each string, or of the JSON.
        tokens: The tokens of the part.
    """

    part: types.Part
    max_chars: int
    tokens: int


@dataclass(frozen=True)
class Preview:
    """The settings of previews: the form in which a model reads large tool results.

    The model reads a preview in every request. It is made in up to three steps:

    1. Long strings are shortened as `strings` says.
    2. If the result takes more than `max_tokens`, its long strings keep only head and
       tail.
    3. If this is not enough, the JSON of the result keeps only head and tail.

    Tokens are estimated from the text alone, so a result has the same bytes in every
    request.

    Attributes:
        max_tokens: How many tokens a result may take; None for any number.
        strings: How strings are shortened in the first step; None for not at all.
        with_handles: Whether a preview gets a handle.
        exclude_tools: The tools whose results stay whole up to `excluded_tokens`.
        excluded_tokens: See `exclude_tools`.
        form: The form of JSON in which results are measured.
    """

    max_tokens: int | None = None
    strings: Truncation | None = None
    with_handles: bool = False
    exclude_tools: tuple[str, ...] = ()
    excluded_tokens: int = 0
    form: JsonForm = COMPACT

    def __call__(self, content: types.Content) -> types.Content | None:
        """Returns the preview of a content; None if the model reads it whole."""
        parts = [self._show(part) for part in content.parts or ()]
        preview = with_parts(content, parts)
        return None if preview is content else preview

    def fits(self, size_bytes: int) -> bool:
        """Whether a content of this size is certainly shown whole."""
        # A string has no more characters than the content has bytes.
        has_short_strings = not self.strings or size_bytes <= self.strings.max_length
        return has_short_strings and self._is_small(size_bytes)

    def _is_small(self, size_bytes: int) -> bool:
        # Four bytes of text take three tokens at most.
        return self.max_tokens is None or size_bytes * 3 <= self.max_tokens * 4

    def _show(self, part: types.Part) -> types.Part:
        """Returns the preview of a part; the part itself if it is read whole."""
        response = part.function_response if part is not None else None
        # The recall tool keeps its results short itself.
        if response is None or not response.response or response.name == RECALL_TOOL:
            return part

        is_excluded = response.name in self.exclude_tools
        if is_excluded and self._count(self._text(part)) <= self.excluded_tokens:
            return part

        whole = part if self.with_handles else None
        shown = _truncate_part(part, self.strings, whole) if self.strings else part
        size_bytes = len(part_text(shown, self.form))
        if self._is_small(size_bytes):
            return shown

        # A shorter result hides more values, so the values are named anew. Only `part`
        # still has all of them.
        values = list_names(payload_of(part) or {})
        unnamed = _drop_names(shown, part)
        return self._fit(unnamed, whole, values)

    def _count(self, text: str) -> int:
        return token_counter(None)(text)

    def _text(self, part: types.Part) -> str:
        return part_text(part, self.form).decode("utf-8", "replace")

    def _fit(
        self, part: types.Part, whole: types.Part | None, values: Sequence[str]
    ) -> types.Part:
        """Shortens the strings of a result; if this is not enough, its JSON.

        If nothing is enough, the JSON is as short as possible.

        Args:
            part: The part with the result.
            whole: The part with the whole result, for the handle; None for no handle.
            values: The values that `NAMES_KEY` may name.
        """
        text = self._text(part)
        start = _Attempt(part, len(text), self._count(text))
        # It is never None here: without a limit, each result is small enough.
        most_tokens = self.max_tokens or 0

        with_short_strings = self._shorten(start, whole, values, shortens_json=False)
        if with_short_strings.tokens <= most_tokens:
            return with_short_strings.part
        with_short_json = self._shorten(start, whole, values, shortens_json=True)
        return with_short_json.part

    def _shorten(
        self,
        start: _Attempt,
        whole: types.Part | None,
        values: Sequence[str],
        shortens_json: bool,
    ) -> _Attempt:
        """Shortens a result ever more, until it fits or is as short as possible.

        Args:
            start: The result before it is shortened.
            whole: See `_fit`.
            values: See `_fit`.
            shortens_json: Whether the JSON may be shortened, and not the strings alone.
        """
        most_tokens = self.max_tokens or 0  # It is never None, as in `_fit`.
        attempt = start
        while attempt.tokens > most_tokens and attempt.max_chars > _MIN_CHARS:
            chars_for_strings = attempt.max_chars * _STRINGS_RATIO
            fitting_chars = int(chars_for_strings * most_tokens / attempt.tokens)
            max_chars = max(_MIN_CHARS, fitting_chars)
            # JSON is shortened if it is more than twice as long as `result_length`.
            result_length = max_chars // 2 if shortens_json else 0
            truncation = Truncation.in_the_middle(max_chars, result_length)

            shown = _truncate_part(start.part, truncation, whole, values)
            if shown is start.part:
                return start  # No string is so long: the size lies in other values.
            attempt = _Attempt(shown, max_chars, self._count(self._text(shown)))
        return attempt
