"""Recognizes errors that say a request is too long, and reads their numbers.

The text of an error is searched for the wordings of providers (`wordings.py`). Some
providers quote the request in their errors. A wording that stands in the request as
well counts as a quotation, and its numbers are not read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

from google.genai import types

from contextguard_adk._measuring.tokens import part_text
from contextguard_adk._providers.wordings import (
    CAPPED_PROMPTS,
    LIMITLESS,
    LIMITS,
    OUTPUTS,
    PAYLOADS,
    PROMPTS,
    RATES,
    REFUSALS,
    SUM,
    TOTALS,
    compile_wordings,
)

MIN_LIMIT_TOKENS: Final = 256
"""A smaller limit is not believed."""

_MOST_COUNT_TOKENS = 100_000_000
"""A larger number counts no tokens."""

# Bounds of the work for one error.
_MOST_ERRORS = 32
_MOST_MATCHES = 50

# A longer text holds a quoted request. The words of the provider stand before or after
# the quotation, so that only the two ends of the text are read.
_MOST_READ_CHARS = 40_000
_END_CHARS = 20_000

# A provider names its numbers in the sentence of the limit, or in one beside it. Three
# sentences have about so many characters before and after the limit.
_CHARS_BEFORE = 300
_CHARS_AFTER = 400


@dataclass(frozen=True)
class Overflow:
    """A provider refused a request because it does not fit the context window.

    A number that the provider did not name is None. If the error names two different
    limits, all numbers are None.

    Attributes:
        limit_tokens: The context window, or the limit of a `period`.
        prompt_tokens: The size of the request.
        output_tokens: The output that the request asked for.
        is_input_plus_output: Whether the limit holds for prompt and output together, so
            that a smaller output would help.
        in_bytes: Whether the limit counts bytes; then all numbers of tokens are None.
        is_quotation: Whether the words of the error may all be quoted from the request;
            then all numbers of tokens are None.
        period: "minute", "hour" or "day" for a rate limit of the key that is below this
            one request with its output; else "".
        model: The model that refused, if the error names it: a gateway may have asked
            another one.
    """

    limit_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    is_input_plus_output: bool = False
    in_bytes: bool = False
    is_quotation: bool = False
    period: str = ""
    model: str = field(default="", compare=False)


# All wordings for a request that is too long.
_ALL_OVERFLOWS = LIMITS + PAYLOADS + LIMITLESS

_BETWEEN_WORDS = re.compile(r"[\W_]+")

_Reading = Overflow | Literal["refused"] | None
"""What an error says: an overflow; "refused" for a refusal that a shorter request would
not avoid; None for anything else."""

# Gateways nest JSON in JSON. Some servers escape `>` and `'` as for HTML.
_ESCAPES: Final = {
    r"\n": " ",
    r"\u003e": ">",
    r"\u003c": "<",
    r"\u0027": "'",
    "&gt;": ">",
    "&lt;": "<",
    "\u2019": "'",
    "\\": "",
    "`": "",
}


def parse_overflow(
    error: BaseException,
    contents: Iterable[types.Content] = (),
    sent_tokens: int = 0,
) -> Overflow | None:
    """Returns the overflow that an error tells; None if it tells none. Never raises.

    A rate limit, a quota or a refusal of the reserved output alone is no overflow,
    because a shorter request would not help. One rate limit is an overflow: if it is
    below the size of this one request, no wait helps.

    Args:
        error: The error that the call raised. The errors linked to it are read as well.
        contents: The messages of the request, which the error may quote. If all that
            tells of an overflow may be quoted, the result has `is_quotation`.
        sent_tokens: The estimated size of the request. A rate limit is compared with it
            if the provider does not name the size.
    """
    sent = _Sent(contents, sent_tokens)
    reading = _ErrorChain(sent).read(error)
    if not isinstance(reading, Overflow):
        return None

    # LiteLLM's errors name the model that refused.
    refusing_model = _attribute(error, "model")
    if isinstance(refusing_model, str):
        return replace(reading, model=refusing_model)
    return reading


class _Sent:
    """The request that was refused.

    Attributes:
        tokens: Its estimated size.
    """

    def __init__(self, contents: Iterable[types.Content], tokens: int) -> None:
        self._contents = contents
        self.tokens = tokens

    @cached_property
    def _bare_text(self) -> str:
        """The text of the request as `_strip_marks` returns it.

        It is one text of all parts, because a quotation may go over several of them.
        """
        part_texts = list[bytes]()
        for content in self._contents:
            for part in content.parts or ():
                part_texts.append(part_text(part))
        text = b" ".join(part_texts).decode(errors="replace")
        return _strip_marks(_plain(text))

    def find_unquoted(self, pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
        """Finds a wording in the text of an error, where it is not a quotation.

        A match is a quotation if the request contains the same letters and digits.
        """
        unquoted_matches = list[re.Match[str]]()
        for match in itertools.islice(pattern.finditer(text), _MOST_MATCHES):
            if _strip_marks(match[0]) not in self._bare_text:
                unquoted_matches.append(match)
        return unquoted_matches


def _strip_marks(text: str) -> str:
    """Returns only the letters and digits of a text: "n_ctx: 4096" -> "nctx4096"."""
    return _BETWEEN_WORDS.sub("", text)


class _ErrorChain:
    """Reads an error and the errors linked to it, each of them once."""

    def __init__(self, sent: _Sent) -> None:
        self._sent = sent
        self._seen_ids = set[int]()

    def read(self, error: BaseException) -> _Reading:
        """Returns what an error and the errors linked to it say.

        The first of these groups that says anything decides:

        1. the error itself and the errors that it wraps
        2. the members of an `ExceptionGroup`
        3. the error in whose handling this one was raised
        """
        # Errors may be linked in a circle.
        is_read_before = id(error) in self._seen_ids
        if is_read_before or len(self._seen_ids) >= _MOST_ERRORS:
            return None
        self._seen_ids.add(id(error))

        # LiteLLM wraps the error of a broken stream in `original_exception`.
        own_reading = _read_error(error, self._sent)
        cause_readings = self._read_linked(error, "__cause__")
        stream_readings = self._read_linked(error, "original_exception")
        reading = _choose_within_failure(
            [own_reading, *cause_readings, *stream_readings]
        )
        if reading is not None:
            return reading

        member_readings = self._read_linked(error, "exceptions")
        member_reading = _choose_between_failures(member_readings)
        if member_reading is not None:
            return member_reading

        # `raise ... from None` says that the context does not matter.
        if _attribute(error, "__suppress_context__"):
            return None
        context_readings = self._read_linked(error, "__context__")
        return _choose_between_failures(context_readings)

    def _read_linked(self, error: BaseException, name: str) -> list[_Reading]:
        """Returns the readings of the errors in an attribute of an error."""
        return [self.read(linked) for linked in _errors_in(error, name)]


def _choose_within_failure(readings: list[_Reading]) -> _Reading:
    """Chooses among the readings of an error and the errors that it wraps.

    They tell of the same failure. The first of these decides: the overflow of a rate
    limit, a refusal, the overflow with most numbers.
    """
    for reading in readings:
        if isinstance(reading, Overflow) and reading.period:
            return reading
    if "refused" in readings:
        return "refused"
    return _find_fullest(readings)


def _choose_between_failures(readings: list[_Reading]) -> _Reading:
    """Chooses among the readings of separate failures.

    One overflow among them is enough. Without an overflow, a refusal decides.
    """
    overflow = _find_fullest(readings)
    if overflow is None and "refused" in readings:
        return "refused"
    return overflow


def _find_fullest(readings: list[_Reading]) -> Overflow | None:
    """Returns the overflow with most numbers; None if no reading is an overflow.

    A wrapper may have cut off the numbers that the wrapped error still has.
    """
    overflows = [reading for reading in readings if isinstance(reading, Overflow)]
    return max(overflows, key=_count_facts, default=None)


def _count_facts(overflow: Overflow) -> int:
    """Returns how many fields of an overflow are not None."""
    return sum(1 for value in astuple(overflow) if value is not None)


def _has_rate_status(error: BaseException) -> bool:
    """Returns whether an error has the HTTP status of a rate limit."""
    with suppress(Exception):
        for name in ("status_code", "code", "status"):
            if _attribute(error, name) in (429, "429"):
                return True
    return False


def _read_error(error: BaseException, sent: _Sent) -> _Reading:
    """Reads one error, without the errors linked to it.

    The wordings are tried from the most special to the most general.
    """
    text = _plain(_error_text(error))
    rate_overflow = _read_rate(text, sent)
    if rate_overflow is not None:
        return rate_overflow
    if _has_rate_status(error) or _find_first(REFUSALS, text, sent):
        return "refused"

    limit_matches = _find_first(LIMITS, text, sent)
    if limit_matches:
        return _read_numbers(text, limit_matches)
    if _find_first(PAYLOADS, text, sent):
        return Overflow(in_bytes=True)

    # LiteLLM adds these words to any overflow. So the wordings above, which say more,
    # are tried first.
    limitless_matches = _find_first(LIMITLESS, text, sent)
    if limitless_matches:
        return _read_numbers(text, limitless_matches)

    # A wording that is found only now stands in the request as well.
    for pattern in compile_wordings(_ALL_OVERFLOWS):
        if pattern.search(text):
            return Overflow(is_quotation=True)
    return None


def _error_text(error: BaseException) -> str:
    """Joins the texts of an error: its message, its fields, and the response's body."""
    sources: list[object] = [error]
    for name in ("message", "body", "code", "details"):
        sources.append(_attribute(error, name))

    response = _attribute(error, "response")
    # `requests` sets `_content` to False until the body is read. To read `text` then
    # would wait for the server.
    is_unread = _attribute(response, "_content") is False
    if not is_unread:
        sources.append(_attribute(response, "text"))

    texts = [_text_of(source) for source in sources]
    # Unlike a set, a dict keeps the order of the texts.
    distinct_texts = dict.fromkeys(texts)
    return " | ".join([_shorten(text) for text in distinct_texts])


def _shorten(text: str) -> str:
    """Keeps the beginning and the end of a text that is too long to be read."""
    if len(text) <= _MOST_READ_CHARS:
        return text
    return f"{text[:_END_CHARS]} ... {text[-_END_CHARS:]}"


def _find_first(
    wordings: tuple[str, ...], text: str, sent: _Sent
) -> list[re.Match[str]]:
    """Returns all matches of the first wording that matches; [] if none does.

    Args:
        wordings: The wordings, in the order in which they are tried.
        text: The text of the error.
        sent: The request. A match that may be quoted from it does not count.
    """
    for pattern in compile_wordings(wordings):
        matches = sent.find_unquoted(pattern, text)
        if matches:
            return matches
    return []


def _read_rate(text: str, sent: _Sent) -> Overflow | None:
    """Reads a rate limit that is below the size of the request; None if there is none.

    A request below the limit may pass after a wait, so that it is no overflow.
    """
    for pattern in compile_wordings(RATES):
        for match in sent.find_unquoted(pattern, text):
            limit_tokens = _read_group(match, "limit")
            if limit_tokens is None or limit_tokens < MIN_LIMIT_TOKENS:
                continue

            named_tokens = _read_group(match, "prompt")
            request_tokens = sent.tokens if named_tokens is None else named_tokens
            if request_tokens > limit_tokens:
                return Overflow(
                    limit_tokens=limit_tokens,
                    prompt_tokens=named_tokens,
                    period=_name_period(match[0]),
                )
    return None


def _name_period(words: str) -> str:
    """Names the period of a rate limit; a minute if the words name none."""
    for period in ("day", "hour"):
        if period in words:
            return period
    return "minute"


def _read_numbers(text: str, matches: list[re.Match[str]]) -> Overflow:
    """Reads the limit of an error, and the tokens of prompt and output near the limit.

    Args:
        text: The text of the whole error.
        matches: The matches of one wording for a request that is too long, at least
            one. A wording may contain numbers.

    Returns:
        The overflow; without numbers if the matches name different limits, because one
        of these must be a quotation.
    """
    limits = {_read_group(match, "limit") for match in matches}
    if len(limits) > 1:
        return Overflow()
    limit_tokens = limits.pop()

    match = matches[0]
    near_start = max(0, match.start() - _CHARS_BEFORE)
    near_end = match.end() + _CHARS_AFTER
    near_text = text[near_start:near_end]

    output_tokens = _read_group(match, "output")
    if output_tokens is None:
        output_tokens = _find_count(OUTPUTS, near_text)
    named_tokens = _read_group(match, "prompt")
    if named_tokens is None:
        named_tokens = _find_count(PROMPTS, near_text)
    prompt_tokens = named_tokens
    if named_tokens is None:
        prompt_tokens = _derive_prompt(near_text, limit_tokens, output_tokens or 0)

    is_limit_of_sum = output_tokens is not None or bool(SUM.search(near_text))
    is_believed = limit_tokens is not None and limit_tokens >= MIN_LIMIT_TOKENS
    return Overflow(
        limit_tokens=limit_tokens if is_believed else None,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        is_input_plus_output=is_limit_of_sum,
    )


def _derive_prompt(
    text: str, limit_tokens: int | None, output_tokens: int
) -> int | None:
    """Returns the tokens of a prompt that an error names only indirectly.

    "requested 9000 tokens", with an output of 1000 -> 8000

    Args:
        text: The text of the error near its limit.
        limit_tokens: The limit; None if unknown.
        output_tokens: The output that was asked for; 0 if unknown.

    Returns:
        The tokens; None if the error does not tell them.
    """
    total_tokens = _find_count(TOTALS, text)
    if total_tokens is not None and total_tokens > output_tokens:
        return total_tokens - output_tokens

    counted_tokens = _find_count(CAPPED_PROMPTS, text)
    if counted_tokens is None or limit_tokens is None:
        return counted_tokens

    # vLLM may stop counting as soon as prompt and output are one token over the limit.
    # Then the prompt may be larger than the count.
    has_stopped_counting = counted_tokens + output_tokens == limit_tokens + 1
    return None if has_stopped_counting else counted_tokens


def _find_count(wordings: tuple[str, ...], text: str) -> int | None:
    """Returns the count in the first wording that a text has; None if it has none."""
    for pattern in compile_wordings(wordings):
        match = pattern.search(text)
        if match:
            return _read_tokens(match["count"])
    return None


def _read_group(match: re.Match[str], name: str) -> int | None:
    """Reads a number in the match of a wording; None if the wording has no such number.

    Args:
        match: The match.
        name: The name of the number: "limit", "prompt" or "output".
    """
    return _read_tokens(match.groupdict().get(name))


def _read_tokens(digits: str | None) -> int | None:
    """Reads a number such as "128,000" or "128_000"; None if it counts no tokens."""
    if not digits:
        return None
    count = int(re.sub("[,_]", "", digits))
    return count if 0 < count <= _MOST_COUNT_TOKENS else None


def _plain(text: str) -> str:
    """Returns a text in lower case, on one line and without escapes."""
    unescaped = text.lower()
    for escape, char in _ESCAPES.items():
        unescaped = unescaped.replace(escape, char)
    return " ".join(unescaped.split())


def _text_of(source: object) -> str:
    """Returns the text of a field of an error; "" if it has none that can be read."""
    with suppress(Exception):
        if isinstance(source, bytes):
            return source.decode(errors="replace")
        if isinstance(source, str | dict | list | BaseException):
            # An error may return an object of a subclass of str; `join` makes it a str.
            return "".join([str(source)])
    return ""


def _attribute(source: object, name: str) -> object:
    """Returns an attribute; None if there is none, or if it cannot be read."""
    with suppress(Exception):
        return getattr(source, name, None)
    return None


def _errors_in(error: BaseException, name: str) -> list[BaseException]:
    """Returns the errors in an attribute, which holds one, several or none."""
    value = _attribute(error, name)
    with suppress(Exception):
        values = value if isinstance(value, list | tuple) else (value,)
        return [linked for linked in values if isinstance(linked, BaseException)]
    return []
