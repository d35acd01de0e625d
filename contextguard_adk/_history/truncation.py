"""Shortens tool results: in a compaction, or from their first request on (`Preview`).

Each long string of a result becomes "<head> <notice> <tail>". If the result is still
too long, it becomes a single string of this form, made from its JSON. A notice tells
how many characters of the whole text are kept.

A result with a list `content` keeps this form: its whole text becomes one item.

A shortened result may have two notes, see `notes`:

- `HANDLE_KEY`: a handle, the short name under which the recall tool finds the whole
  result. The result gets a handle if the caller passes the `whole` content or part.
- `NAMES_KEY`: values of the whole result, such as ids and paths, that the shortened
  result does not show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, Self

from google.genai import types
from pydantic import Field

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import payload_of, with_parts
from contextguard_adk._history.extraction import TELLING, name_hidden, read_fields
from contextguard_adk._history.fingerprints import handle_of
from contextguard_adk._history.item_lists import (
    as_excerpt,
    describe_large_files,
    drop_copy,
    has_items,
    readable_text,
)
from contextguard_adk._history.notes import (
    HANDLE_KEY,
    NAMES_KEY,
    add_notes,
    has_names,
    has_names_field,
    sent_text,
    split_notes,
)
from contextguard_adk._history.notes import without_names as without_names_note
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

NAMES_RATIO = 0.5
"""For each character of `Truncation.max_length`, the values of `NAMES_KEY` may take
this many bytes.
"""

_FIELD_TURN = 16
"""How many values of a field are named before those of the next field."""

MAX_NAMES_BYTES = 16_000
"""The values of `NAMES_KEY` never take more bytes than this."""

_MIN_CHARS = 100
"""Until a result fits, its strings are shortened again, but never to less than this."""

_NOTICE_CHARS = 100
"""If `Truncation.max_length` is 0, a notice replaces each result longer than this.

The notice tells the length of the result. Other results stay as they are.
"""

_HEAD_RATIO = 0.6
"""How much of a shortened string is head; the rest is tail."""

_MOST_KEPT_RATIO = 0.8
"""Each attempt to fit results allows the strings at most this part of their length.

Tokens do not fall as fast as characters, so smaller steps could take many attempts.
"""

_STRINGS_RATIO = 0.95
"""The part of a result's tokens that its strings may take.

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
        max_length: A longer string is shortened. With 0, a whole result is replaced by
            a notice of its size.
        show_truncation_notice: Whether a shortened string has a notice, and a shortened
            result has the field `NAMES_KEY`.
        smart_truncate: If true, a shortened string keeps its first `head_length` and
            its last `tail_length` characters. If false, it keeps its first `max_length`
            characters.
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
        """Returns settings that leave out the middle of each string.

        Args:
            length: How many characters of a string stay, head and tail together.
            result_length: See `Truncation.result_length`.
        """
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
    """Returns a copy of a content with shortened tool results.

    Returns the content itself if no result has to be shortened.

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
        most_tokens: The most tokens that the contents may take together.
        measure: Counts the tokens of contents.
        has_recall: Whether shortened results get a handle.
        tools: The names of the tools whose results stay as they are.

    Returns:
        How results are shortened, and how many tokens the contents take then. If the
        contents cannot fit, both are those of the shortest form.
    """
    # A heuristic token is four bytes, so this is about the size of all contents. The
    # first attempt shortens next to nothing.
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

    Returns the part itself if it has no result, if `truncation` excludes the tool, or
    if nothing in the result is too long.

    Args:
        part: The part.
        truncation: How the result is shortened.
        whole: The part before it was shortened, for the handle of the result; None for
            no handle.
        values: The values that `NAMES_KEY` may name; None for the values of `part`.
    """
    # Another plugin may put None among the parts.
    response = part.function_response if part is not None else None
    if response is None or not response.response:
        return part
    if response.name in truncation.exclude_tools:
        return part

    # `part` may be a preview, which has notes. A field of their name may be the tool's.
    noted_result, notes = split_notes(response.response)
    result = drop_copy(noted_result)
    earlier_names = notes.pop(NAMES_KEY, "")
    shortened = _shorten_result(result, truncation, payload_of(whole or part))
    if shortened is result:
        return part

    # If nothing of the result is shown, it would be of little use to list its values.
    may_name = truncation.show_truncation_notice and truncation.max_length > 0
    if may_name and not has_names_field(result):
        if values is None:
            values = list_names_again(result, earlier_names)
        note = _name_values(values, shortened, truncation)
        # The names may make the result as long as it was before.
        named = add_notes(shortened, note)
        if len(payload_text(named)) < len(payload_text(response.response)):
            notes |= note

    # The recall tool copies items that have a handle, so its results get none.
    if whole and response.name != RECALL_TOOL:
        notes[HANDLE_KEY] = handle_of(whole)
    return _with_response(part, response, add_notes(shortened, notes))


def _shorten_result(
    result: dict[str, Any], truncation: Truncation, whole_result: object
) -> dict[str, Any]:
    """Shortens a result, or replaces it by a notice.

    Returns the result itself if it stays as it is.

    Args:
        result: The result, without its notes.
        truncation: How the result is shortened.
        whole_result: The result before it was shortened, if that is known. The notice
            tells its size.
    """
    if truncation.max_length == 0:
        return _replace_by_notice(result, len(payload_text(whole_result)))
    return _truncate_and_quote(result, truncation)


def _replace_by_notice(result: dict[str, Any], size_chars: int) -> dict[str, Any]:
    """Returns a notice in place of a result; the result itself if it is small.

    Args:
        result: The result.
        size_chars: The size of the whole result, which the notice tells.
    """
    if size_chars <= _NOTICE_CHARS:
        return result
    return {"result": TRUNCATED.format(0, size_chars)}


def _with_response(
    part: types.Part, response: types.FunctionResponse, result: dict[str, Any]
) -> types.Part:
    """Returns a copy of a part with another result; `response` is that of the part."""
    copied = response.model_copy(update={"response": result})
    return part.model_copy(update={"function_response": copied})


def _truncate_and_quote(
    result: dict[str, Any], truncation: Truncation
) -> dict[str, Any]:
    """Shortens a result; returns the result itself if nothing in it is too long."""
    if _truncate_result(result, truncation) is result:
        return result
    # A shortened result has notices of the guard. The tool's own text is quoted first,
    # so that it cannot be taken for such a notice.
    return _truncate_result(quote_value(result), truncation)


def _name_values(
    values: Sequence[str], shortened: dict[str, Any], truncation: Truncation
) -> dict[str, str]:
    """Returns the note `NAMES_KEY` for a shortened result; {} for no note.

    Args:
        values: The values that may be named.
        shortened: The shortened result.
        truncation: How the result was shortened.
    """
    usual_bytes = int(truncation.max_length * NAMES_RATIO)
    return name_rest(values, shortened, min(MAX_NAMES_BYTES, usual_bytes))


def list_names(result: dict[str, Any]) -> list[str]:
    """Lists the values of a result that look like an id, a path or a name.

    `read_values` finds more values: numbers, and short texts that fill a field. Of
    these only the numbers without a sign or a point are listed. The fields take turns:
    each gives `_FIELD_TURN` values, so that the others have room beside a long one.
    """
    # The base64 of an image has no values.
    reading = read_fields(describe_large_files(result, max_chars=0))
    counts = Counter[str]()
    turns: dict[str, int] = {}
    for (value, telling), field in zip(reading.values, reading.fields, strict=True):
        is_listed = telling >= TELLING or value.isdecimal()
        if is_listed and value not in turns:
            turns[value] = counts[field] // _FIELD_TURN
            counts[field] += 1
    return sorted(turns, key=turns.__getitem__)


def list_names_again(result: dict[str, Any], earlier_names: str) -> list[str]:
    """Lists the names of a result that may be a preview.

    Args:
        result: The result, without its notes.
        earlier_names: The note `NAMES_KEY` of the preview; "" for none.
    """
    names = list_names(result)
    if not earlier_names:
        return names
    # A number may be one of the guard's notices.
    names = [name for name in names if not name.isdecimal()]
    return [*names, *earlier_names.split(", ")]


def name_rest(
    values: Sequence[str], shown: dict[str, Any], max_bytes: int
) -> dict[str, str]:
    """Returns the note `NAMES_KEY` with values that a shortened result does not show.

    For example: {"not_shown": "ord-81, src/a.py"}. Returns {} if the result shows all
    values, or if no value fits.

    Args:
        values: The values of the whole result.
        shown: The shortened result.
        max_bytes: The most bytes that the named values may take.
    """
    names = name_hidden(values, sent_text(shown), max_bytes)
    return {NAMES_KEY: quote_line(names)} if names else {}


def _drop_names(part: types.Part, whole: types.Part) -> types.Part:
    """Returns a part without the guard's note `NAMES_KEY` in its result.

    Returns the part itself if the result has no such note, or has it from the tool.

    Args:
        part: The part, perhaps with a shortened result.
        whole: The same part before it was shortened.
    """
    response = part.function_response if part is not None else None
    if response is None or not response.response:
        return part

    if has_names(payload_of(whole) or {}):
        return part
    unnamed = without_names_note(response.response)
    if unnamed is response.response:
        return part
    return _with_response(part, response, unnamed)


def _drop_copy(part: types.Part) -> types.Part:
    """Returns a part whose result says nothing twice; itself if nothing is dropped."""
    response = part.function_response
    if response is None or not response.response:
        return part
    without_copy = drop_copy(response.response)
    if without_copy is response.response:
        return part
    return _with_response(part, response, without_copy)


def _without_files(part: types.Part) -> types.Part:
    """Returns a part whose result has lines in place of images and other files."""
    response = part.function_response
    if response is None or not response.response:
        return part
    described = describe_large_files(response.response, max_chars=0)
    return _with_response(part, response, described)


def _truncate_result(result: dict[str, Any], truncation: Truncation) -> dict[str, Any]:
    """Shortens the long strings of a result, and its JSON if that is still too long.

    Returns one of these:

    - The result itself, if nothing in it is too long.
    - A copy with shortened strings, and with lines in place of long images.
    - {"result": "<head> <notice> <tail>"} with the shortened JSON, or a list `content`
      with such a text as its only item.
    """
    described = describe_large_files(result, truncation.max_length)
    short_strings: dict[str, Any] = truncate_value(described, truncation)
    excerpt_chars = truncation.result_length
    if excerpt_chars == 0:
        return short_strings

    text = json_text(short_strings).decode("utf-8", "surrogatepass")
    # The JSON also has notices and the names of fields. So it may be twice as long as
    # the shortened JSON before it is cut.
    if len(text) <= 2 * excerpt_chars:
        return short_strings
    excerpt_settings = replace(truncation, max_length=excerpt_chars)
    if has_items(short_strings):
        text = readable_text(short_strings)
    return as_excerpt(short_strings, truncate_text(text, excerpt_settings))


def truncate_value(value: Any, truncation: Truncation, depth: int = 0) -> Any:
    """Shortens the long strings in a JSON value.

    Returns the value itself if no string in it becomes shorter.

    Args:
        value: A JSON value.
        truncation: How strings are shortened.
        depth: The number of dicts and lists around the value; 0 for none.
    """
    if isinstance(value, str):
        return truncate_text(value, truncation)
    if depth >= _MAX_DEPTH or not isinstance(value, dict | list):
        return value

    items = list(value.values()) if isinstance(value, dict) else value
    new_items = [truncate_value(item, truncation, depth + 1) for item in items]
    # An item that stays as it is has been returned itself.
    if [id(item) for item in new_items] == [id(item) for item in items]:
        return value
    if isinstance(value, dict):
        return dict(zip(value, new_items, strict=True))
    return new_items


def truncate_text(text: str, truncation: Truncation) -> str:
    """Shortens a string if it is longer than `max_length`.

    The shortened string is "<head> <notice> <tail>". It has a tail only with
    `smart_truncate`, and a notice only with `show_truncation_notice`. If head, notice
    and tail are not shorter than the string, the string itself is returned.
    """
    if len(text) <= truncation.max_length:
        return text

    head = text[: truncation.max_length]
    tail = ""
    if truncation.smart_truncate:
        head = text[: truncation.head_length]
        tail_start = len(text) - truncation.tail_length
        # After the notice, the tail begins a new line. The tail is quoted again, so
        # this line cannot be taken for a line of the guard.
        tail = quote(text[tail_start:])

    notice = ""
    if truncation.show_truncation_notice:
        kept_chars = len(head) + len(tail)
        notice = f"\n{TRUNCATED.format(kept_chars, len(text))}\n"

    shortened = head + notice + tail
    return shortened if len(shortened) < len(text) else text


class _Attempt(NamedTuple):
    """A shortened result, of which it is not known yet whether it is short enough.

    Attributes:
        part: The part with the shortened result.
        max_chars: The most characters that each string may have, or the JSON.
        tokens: The tokens of the part.
    """

    part: types.Part
    max_chars: int
    tokens: int


@dataclass(frozen=True)
class Preview:
    """The settings of previews: the form in which a model reads large tool results.

    The model reads the preview of a result in every request, in place of the result. A
    preview is made in up to three steps:

    1. Long strings of the result are shortened as `strings` says.
    2. If the result takes more than `max_tokens`, its long strings are shortened to
       head and tail.
    3. If this is not enough, the JSON of the result is shortened to head and tail.

    Tokens are estimated from the text alone, without the correction of a model. So the
    preview of a result has the same bytes in every request.

    Attributes:
        max_tokens: How many tokens a result may take; None for any number.
        strings: How strings are shortened in the first step; None skips this step.
        with_handles: Whether a preview gets a handle.
        exclude_tools: The names of tools whose results stay whole, unless a result
            takes more than `excluded_tokens`.
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
        """Whether a content of this size is shown whole, whatever stands in it.

        If the result is False, the content may be shown whole all the same.
        """
        # A string has at most as many characters as the content has bytes.
        has_short_strings = not self.strings or size_bytes <= self.strings.max_length
        return has_short_strings and self._is_small(size_bytes)

    def _is_small(self, size_bytes: int) -> bool:
        """Whether a text of this size takes at most `max_tokens` in any case."""
        # No text takes more than three tokens for four bytes.
        return self.max_tokens is None or size_bytes * 3 <= self.max_tokens * 4

    def _show(self, part: types.Part) -> types.Part:
        """Returns the preview of a part; the part itself if it is shown whole."""
        response = part.function_response if part is not None else None
        # The recall tool itself keeps its results short.
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

        # The next steps hide more values than the first one, so they name the values
        # again. Only `part` still has all values.
        values = list_names(payload_of(part) or {})
        unnamed = _drop_copy(_drop_names(shown, part))
        return self._fit(unnamed, whole, values)

    def _count(self, text: str) -> int:
        """Estimates the tokens of a text, without the correction of a model."""
        return token_counter(None)(text)

    def _text(self, part: types.Part) -> str:
        return part_text(part, self.form).decode("utf-8", "replace")

    def _fit(
        self, part: types.Part, whole: types.Part | None, values: Sequence[str]
    ) -> types.Part:
        """Shortens the strings of a result; if this is not enough, its JSON.

        If no length of the JSON is enough, the JSON is as short as possible. A part
        that fits is returned itself.

        Args:
            part: The part with the result.
            whole: The part with the whole result, for the handle; None for no handle.
            values: The values that `NAMES_KEY` may name.
        """
        # `max_tokens` is not None here. Without `max_tokens` every result is small, and
        # `_show` does not call this method.
        most_tokens = self.max_tokens or 0
        if self._count(self._text(part)) <= most_tokens:
            return part

        # Large files will be replaced, so they take no room from the texts.
        text = self._text(_without_files(part))
        tokens = max(self._count(text), most_tokens + 1)
        start = _Attempt(part, len(text), tokens)

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

        Returns `start` if the result fits already, or if nothing can be shortened.

        Args:
            start: The result before it is shortened.
            whole: See `_fit`.
            values: See `_fit`.
            shortens_json: Whether not only the strings are shortened, but also the JSON
                if it is too long.
        """
        # `max_tokens` is not None here: see `_fit`.
        most_tokens = self.max_tokens or 0
        attempt = start
        while attempt.tokens > most_tokens and attempt.max_chars > _MIN_CHARS:
            # The last attempt had too many tokens, so the length is reduced in
            # proportion, and by the part that does not belong to strings.
            chars_for_strings = attempt.max_chars * _STRINGS_RATIO
            fitting_chars = int(chars_for_strings * most_tokens / attempt.tokens)
            max_chars = max(_MIN_CHARS, fitting_chars)
            # JSON that is longer than twice `result_length` is shortened to head and
            # tail, which have `max_chars` together.
            result_length = max_chars // 2 if shortens_json else 0
            truncation = Truncation.in_the_middle(max_chars, result_length)

            shown = _truncate_part(start.part, truncation, whole, values)
            if shown is start.part:
                # Nothing is longer than `max_chars`: numbers and the names of fields,
                # which are not shortened, take the tokens.
                return start
            attempt = _Attempt(shown, max_chars, self._count(self._text(shown)))
        return attempt
