"""Shortens tool results: in a compaction, or from their first request on.

A handle is a short name under which the recall tool finds the whole result. A shortened
result has a handle, in the field `HANDLE_KEY`, if the caller passes the `whole` content
or part. A notice in a shortened text tells how many characters of it are left.
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
"""The field of a shortened result for its handle."""

NAMES_KEY = "not_shown"
"""The field of a shortened result for values that are only in the omitted text."""

NAMES_RATIO = 0.5
"""The values of `NAMES_KEY` may take this many bytes for each character of the length
to which strings are shortened.
"""

MAX_NAMES_BYTES = 16_000
"""The values of `NAMES_KEY` never take more bytes than this."""

_MIN_LENGTH = 100
"""To fit a result, its strings are never made shorter than this many characters."""

_NOTICE_CHARS = 100
"""A result that is no longer than this is not replaced by a notice of its size."""

_HEAD_SHARE = 0.6
"""How much of a shortened string is its beginning; the rest is its end."""

_SLOWEST_STEP = 0.8
"""Each attempt to fit results makes the strings shorter by a fifth at least.

Tokens do not fall as fast as characters, so smaller steps could take many attempts.
"""

_SPACE_FOR_NOTICES = 0.95
"""The notice, the handle and the other fields of a result take about a twentieth."""

Length = Annotated[int, Field(ge=0, le=2**53)]  # As session state keeps it.


@dataclass(frozen=True)
class Truncation:
    """How the strings in tool results are shortened. All lengths are in characters.

    Attributes:
        max_length: Strings that are longer are shortened to their first `max_length`
            characters. With 0, a result is replaced by a notice of its size.
        show_truncation_notice: Whether a shortened string tells how much of it is left,
            and the result names values that are not shown, in half of `max_length`.
        smart_truncate: Whether a shortened string keeps `head_length` characters of its
            beginning and `tail_length` of its end instead.
        head_length: See `smart_truncate`.
        tail_length: See `smart_truncate`.
        result_length: A result whose JSON is over twice as long becomes an excerpt of
            the JSON, of this length; with 0, none does.
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
        head_length = int(length * _HEAD_SHARE)
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

    `whole` is the same content before it was shortened; None for no handles.
    """
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
    # The first attempt shortens next to nothing: a token has about four characters.
    length = 4 * estimate_contents_tokens(contents)
    while True:
        for_all_tools = Truncation.in_the_middle(length, result_length=length)
        truncation = replace(for_all_tools, exclude_tools=tools)
        shortened = [
            truncate_content(content, truncation, content if has_recall else None)
            for content in contents
        ]

        tokens = measure(shortened)
        if tokens <= most_tokens or length <= _MIN_LENGTH:
            return truncation, tokens
        ratio = min(_SLOWEST_STEP, most_tokens / tokens)
        length = max(_MIN_LENGTH, int(length * ratio))


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
        truncation: How its result is shortened.
        whole: The part before it was shortened, for the handle of the result; None for
            no handle.
        values: The values that the shortened result names if it does not show them;
            None for the values of the result itself.
    """
    response = part.function_response if part is not None else None
    if response is None or not response.response:
        return part
    if response.name in truncation.exclude_tools:
        return part

    if truncation.max_length == 0:
        # The part may be a preview, so the notice tells the size of the whole result.
        size_chars = len(payload_text(payload_of(whole or part)))
        if size_chars <= _NOTICE_CHARS:
            return part
        fields = {"result": TRUNCATED.format(0, size_chars)}
    else:
        fields = _name_and_truncate(response.response, truncation, values)
        if fields is response.response:
            return part

    # A result of the recall tool is a copy: the original has a handle already.
    if whole and response.name != RECALL_TOOL:
        handle_field = {HANDLE_KEY: handle_of(whole)}
        return _with_response(part, response, fields | handle_field)
    return _with_response(part, response, fields)


def _with_response(
    part: types.Part, response: types.FunctionResponse, result: dict[str, Any]
) -> types.Part:
    copied = response.model_copy(update={"response": result})
    return part.model_copy(update={"function_response": copied})


def _name_and_truncate(
    result: dict[str, Any], truncation: Truncation, values: Sequence[str] | None
) -> dict[str, Any]:
    """Shortens a result, and adds the values that it does not show any more.

    No values are added if notices are off, or if the result would not become shorter
    with them. Returns the result itself if it needs no shortening.

    Args:
        result: The whole result.
        truncation: How it is shortened.
        values: The values that may be added; None for the values of the result itself.
    """
    if _truncate_result(result, truncation) is result:
        return result

    # A shortened result has notices. The tool's own text is quoted first, so that no
    # text in it can pass for a notice.
    shortened = _truncate_result(quote_value(result), truncation)
    if not truncation.show_truncation_notice or NAMES_KEY in result:
        return shortened

    max_bytes = min(MAX_NAMES_BYTES, int(truncation.max_length * NAMES_RATIO))
    possible_names = list_names(result) if values is None else values
    with_names = name_rest(possible_names, shortened, max_bytes)
    is_shorter = len(payload_text(with_names)) < len(payload_text(result))
    return with_names if is_shorter else shortened


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
    """Adds the values that a shortened result does not show, under `NAMES_KEY`.

    The added values take at most `max_bytes`. Returns the result itself if there are
    none.
    """
    names = name_hidden(values, payload_text(shown), max_bytes)
    return {**shown, NAMES_KEY: quote_line(names)} if names else shown


def without_names(shown: types.Content, whole: types.Content) -> types.Content:
    """Returns a shortened content without the values that the guard has added to it."""
    unnamed_parts = [
        _drop_names(part, whole_part)
        for part, whole_part in zip(shown.parts or (), whole.parts or (), strict=True)
    ]
    return with_parts(shown, unnamed_parts)


def _drop_names(part: types.Part, whole: types.Part) -> types.Part:
    """Leaves out the added values; a tool's own field of the same name stays."""
    response = part.function_response if part is not None else None
    if response is None or not response.response:
        return part

    is_added = NAMES_KEY not in (payload_of(whole) or {})
    if NAMES_KEY not in response.response or not is_added:
        return part

    other_fields = {
        name: value for name, value in response.response.items() if name != NAMES_KEY
    }
    return _with_response(part, response, other_fields)


def _truncate_result(result: dict[str, Any], truncation: Truncation) -> dict[str, Any]:
    """Shortens the strings of a result, and then its JSON if that is still too long.

    A result with shortened JSON is {"result": "<excerpt of the JSON>"}. Returns the
    result itself if nothing is too long.
    """
    short_strings: dict[str, Any] = truncate_value(result, truncation)
    length = truncation.result_length
    if length == 0:
        return short_strings

    text = json_text(short_strings).decode("utf-8", "surrogatepass")
    # Twice the length, because notices and names of fields are around short strings.
    if len(text) <= 2 * length:
        return short_strings
    return {"result": truncate_text(text, replace(truncation, max_length=length))}


def truncate_value(value: Any, truncation: Truncation, depth: int = 0) -> Any:
    """Shortens the strings in a JSON value, nested up to 100 deep.

    Returns the value itself if none is too long.
    """
    if isinstance(value, str):
        return truncate_text(value, truncation)
    if depth >= 100 or not isinstance(value, dict | list):
        return value

    items = list(value.values()) if isinstance(value, dict) else value
    new_items = [truncate_value(item, truncation, depth + 1) for item in items]
    if [id(item) for item in new_items] == [id(item) for item in items]:
        return value
    if isinstance(value, dict):
        return dict(zip(value, new_items, strict=True))
    return new_items


def truncate_text(text: str, truncation: Truncation) -> str:
    """Shortens a string that is too long.

    Returns the string itself if it is short, or the notice would make it longer.
    """
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

    First `strings` shortens the strings of a result. If the result still takes more
    than `max_tokens`, its long strings keep only head and tail. If this is not enough
    either, its JSON keeps only head and tail. Tokens are estimated from the text alone,
    so a result has the same bytes in every request.

    Attributes:
        max_tokens: How many tokens a result may take; None for any number.
        strings: How strings are shortened in any case; None for not at all.
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
        """Returns the preview of a content; None if the agent is shown it whole."""
        parts = [self._show(part) for part in content.parts or ()]
        preview = with_parts(content, parts)
        return None if preview is content else preview

    def fits(self, size_bytes: int) -> bool:
        """Whether a content of this size is certainly shown whole."""
        has_short_strings = not self.strings or size_bytes <= self.strings.max_length
        return has_short_strings and self._is_small(size_bytes)

    def _is_small(self, size_bytes: int) -> bool:
        # Four bytes of text take three tokens at most.
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
        shown = _truncate_part(part, self.strings, whole) if self.strings else part
        size_bytes = len(part_text(shown, self.form))
        if self._is_small(size_bytes):
            return shown

        # `_fit` names values itself, also those that only `part` still has.
        values = list_names(payload_of(part) or {})
        unnamed = _drop_names(shown, part)
        return self._fit(unnamed, whole, values)

    def _count(self, part: types.Part) -> int:
        return token_counter(None)(self._text(part))

    def _text(self, part: types.Part) -> str:
        return part_text(part, self.form).decode("utf-8", "replace")

    def _fit(
        self, part: types.Part, whole: types.Part | None, values: Sequence[str]
    ) -> types.Part:
        """Shortens the strings of a result; if this is not enough, its JSON.

        Either way starts from the whole result, and makes it shorter until it takes at
        most `max_tokens`. If nothing fits, the last attempt is returned.

        Args:
            part: The part with the whole result.
            whole: The same part, for the handle; None for no handle.
            values: The values that the shortened result names if it does not show them.
        """
        text = self._text(part)
        whole_tokens = token_counter(None)(text)
        most_tokens = self.max_tokens or 0
        shown = part

        for shortens_json in (False, True):
            length = len(text)
            tokens = whole_tokens
            while tokens > most_tokens and length > _MIN_LENGTH:
                fitting_length = length * _SPACE_FOR_NOTICES * most_tokens / tokens
                length = max(_MIN_LENGTH, int(fitting_length))
                # JSON becomes an excerpt only if it is longer than twice
                # `result_length`; with 0 it never does.
                result_length = length // 2 if shortens_json else 0
                truncation = Truncation.in_the_middle(length, result_length)

                shown = _truncate_part(part, truncation, whole, values)
                if shown is part:
                    break  # No string is longer, so a shorter length is no use here.
                tokens = self._count(shown)

            if tokens <= most_tokens:
                return shown
        return shown
