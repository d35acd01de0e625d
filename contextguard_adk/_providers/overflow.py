"""Recognizes errors that say a request is too long, and reads their numbers.

The text of an error is searched for the wordings of providers (`wordings.py`). Some
providers quote the request in their errors. So words of an error that the request
contains as well count as a quotation, and the numbers in a quotation are not read.

An error may be linked to other errors, such as the error that it wraps (its cause). A
refusal, in this file, is an error that a shorter request would not avoid.
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
"""A smaller number is not believed to be a limit."""

_MOST_COUNT_TOKENS = 100_000_000
"""A larger number is not believed to be a count of tokens."""

_MOST_ERRORS = 32
"""The most errors that are read: an error and the errors linked to it."""

_MOST_MATCHES = 50
"""The most matches of one wording that are compared with the request."""

# A text of more characters holds a quoted request. The words of the provider stand
# before or after the quotation, so only the two ends of the text are read.
_MOST_READ_CHARS = 40_000
_END_CHARS = 20_000

# A provider names its numbers near the limit: in the same sentence, the sentence before
# or the sentence after. So many characters before and after the limit hold these three.
_CHARS_BEFORE = 300
_CHARS_AFTER = 400


@dataclass(frozen=True)
class Overflow:
    """A provider refused a request because the request is too long.

    A number that the provider did not name is None. If the error names two different
    limits, all numbers are None.

    Attributes:
        limit_tokens: The context window, or the limit of a `period`.
        prompt_tokens: The size of the request.
        output_tokens: The output that the request asked for.
        is_input_plus_output: Whether the limit holds for prompt and output together.
            Then a smaller output would help.
        in_bytes: Whether the limit counts bytes; then all numbers of tokens are None.
        is_quotation: Whether all words that tell of the overflow may be a quotation;
            then all numbers of tokens are None.
        period: The period of a rate limit: "minute", "hour" or "day". The limit is
            smaller than this one request with its output. "" if the limit is no rate
            limit.
        model: The name of the model that refused; "" if the error names no model. A
            gateway may have asked another model than the request names.
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

# What `_strip_marks` removes.
_BETWEEN_WORDS = re.compile(r"[\W_]+")

_Reading = Overflow | Literal["refused"] | None
"""What an error says: an overflow, a refusal, or nothing about the request's length."""

# What stands in an error for a plain character. Gateways nest JSON in JSON. Some
# servers escape `>` and `'` as in HTML.
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
    """Returns the overflow that an error reports; None if there is none. Never raises.

    An overflow is an error that a shorter request would avoid. These are overflows:

    - The request does not fit the context window.
    - The request has too many bytes.
    - The request is larger than a rate limit of the key: no wait would help.

    These are no overflows: any other rate limit, a quota, and a reserved output that is
    too large by itself.

    Args:
        error: The error that the call raised. Errors linked to it are read as well.
        contents: The messages of the request, which the error may quote. If all words
            that tell of an overflow may be quoted, the result has `is_quotation`.
        sent_tokens: The estimated size of the request. A rate limit is compared with
            this size if the provider names no size.
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
    """The request that was sent.

    Attributes:
        tokens: The estimated size of the request.
    """

    def __init__(self, contents: Iterable[types.Content], tokens: int) -> None:
        self._contents = contents
        self.tokens = tokens

    @cached_property
    def _bare_text(self) -> str:
        """The letters and digits of the request, in lower case.

        All parts make one text, because a quotation may begin in one part and end in
        another.
        """
        part_texts = list[bytes]()
        for content in self._contents:
            for part in content.parts or ():
                part_texts.append(part_text(part))
        text = b" ".join(part_texts).decode(errors="replace")
        return _strip_marks(_plain(text))

    def find_unquoted(self, pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
        """Returns the matches of a wording in an error's text that are no quotations.

        A match is a quotation if the request contains the same letters and digits.

        Args:
            pattern: The wording.
            text: The text of the error, from `_plain`.
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
    """Reads an error and the errors linked to it, each error once."""

    def __init__(self, sent: _Sent) -> None:
        self._sent = sent
        self._seen_ids = set[int]()

    def read(self, error: BaseException) -> _Reading:
        """Returns what an error and the errors linked to it say.

        The first of these groups that says anything decides:

        1. the error itself, and the errors that it wraps
        2. the members of the error, if it is an `ExceptionGroup`
        3. the context: the error that was handled when `error` was raised
        """
        # Errors may be linked in a circle.
        is_read_before = id(error) in self._seen_ids
        if is_read_before or len(self._seen_ids) >= _MOST_ERRORS:
            return None
        self._seen_ids.add(id(error))

        own_reading = _read_error(error, self._sent)
        cause_readings = self._read_linked(error, "__cause__")
        # LiteLLM puts the error of a broken stream in `original_exception`.
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

        # `raise ... from …` says that the context does not matter: the cause is read.
        if _attribute(error, "__suppress_context__"):
            return None
        context_readings = self._read_linked(error, "__context__")
        return _choose_between_failures(context_readings)

    def _read_linked(self, error: BaseException, name: str) -> list[_Reading]:
        """Returns the readings of the errors in an attribute of an error.

        Args:
            error: The error.
            name: The name of the attribute, which has one error, several or none.
        """
        return [self.read(linked) for linked in _errors_in(error, name)]


def _choose_within_failure(readings: list[_Reading]) -> _Reading:
    """Chooses among the readings of errors that tell of the same failure.

    The first of these that is among the readings is returned, else None:

    1. The overflow of a rate limit. If another error wraps this one, the other may have
       only the status of a rate limit, which reads as a refusal.
    2. A refusal. LiteLLM wraps some refusals in errors that read as overflows.
    3. The overflow with most numbers.
    """
    for reading in readings:
        if isinstance(reading, Overflow) and reading.period:
            return reading
    if "refused" in readings:
        return "refused"
    return _find_fullest(readings)


def _choose_between_failures(readings: list[_Reading]) -> _Reading:
    """Chooses among the readings of separate failures.

    The first of these that is among the readings is returned, else None:

    1. The overflow with most numbers. A shorter request avoids this failure, whatever
       the other failures are.
    2. A refusal.
    """
    overflow = _find_fullest(readings)
    if overflow is None and "refused" in readings:
        return "refused"
    return overflow


def _find_fullest(readings: list[_Reading]) -> Overflow | None:
    """Returns the overflow with most numbers; None if no reading is an overflow.

    An error may lack numbers that the error wrapped in it has.
    """
    overflows = [reading for reading in readings if isinstance(reading, Overflow)]
    return max(overflows, key=_count_facts, default=None)


def _count_facts(overflow: Overflow) -> int:
    """Returns how many fields of an overflow are not None.

    Only numbers can be None, so more such fields mean more numbers.
    """
    return sum(1 for value in astuple(overflow) if value is not None)


def _has_rate_status(error: BaseException) -> bool:
    """Returns whether an error has the HTTP status of a rate limit."""
    with suppress(Exception):  # A value may raise as it is compared.
        for name in ("status_code", "code", "status"):
            if _attribute(error, name) in (429, "429"):
                return True
    return False


def _read_error(error: BaseException, sent: _Sent) -> _Reading:
    """Returns what one error says, without the errors linked to it.

    Special wordings are tried before general ones: the first that matches decides.
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

    # LiteLLM adds one of these wordings to any overflow. The wordings above say more,
    # so they are tried before.
    limitless_matches = _find_first(LIMITLESS, text, sent)
    if limitless_matches:
        return _read_numbers(text, limitless_matches)

    # No wording was found outside of quotations. So each match here is a quotation.
    for pattern in compile_wordings(_ALL_OVERFLOWS):
        if pattern.search(text):
            return Overflow(is_quotation=True)
    return None


def _error_text(error: BaseException) -> str:
    """Returns the texts of an error in one: its message, fields and response's body."""
    sources: list[object] = [error]
    for name in ("message", "body", "code", "details"):
        sources.append(_attribute(error, name))

    response = _attribute(error, "response")
    # In a response of `requests`, `_content` is False until the body is read. While it
    # is False, access to `text` would wait for the server.
    is_unread = _attribute(response, "_content") is False
    if not is_unread:
        sources.append(_attribute(response, "text"))

    texts = [_text_of(source) for source in sources]
    # A dict keeps the order of the texts; a set would not.
    distinct_texts = dict.fromkeys(texts)
    return " | ".join([_shorten(text) for text in distinct_texts])


def _shorten(text: str) -> str:
    """Returns the beginning and the end of a text that is too long to be read whole.

    A shorter text is returned as it is.
    """
    if len(text) <= _MOST_READ_CHARS:
        return text
    return f"{text[:_END_CHARS]} ... {text[-_END_CHARS:]}"


def _find_first(
    wordings: tuple[str, ...], text: str, sent: _Sent
) -> list[re.Match[str]]:
    """Returns all matches of the first wording that matches; [] if none matches.

    Args:
        wordings: The wordings, in the order in which they are tried.
        text: The text of the error, from `_plain`.
        sent: The request. Quotations from the request are no matches.
    """
    for pattern in compile_wordings(wordings):
        matches = sent.find_unquoted(pattern, text)
        if matches:
            return matches
    return []


def _read_rate(text: str, sent: _Sent) -> Overflow | None:
    """Returns the overflow of a rate limit that is smaller than the request, else None.

    A request that is smaller than the rate limit may pass after a wait. So the error
    about such a request is no overflow.

    Args:
        text: The text of the error, from `_plain`.
        sent: The request. Its estimated size counts if the error names no size.
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
    """Returns the period of a rate limit; "minute" if the words name no period."""
    for period in ("day", "hour"):
        if period in words:
            return period
    return "minute"


def _read_numbers(text: str, matches: list[re.Match[str]]) -> Overflow:
    """Reads the limit of an error, and the tokens of prompt and output near the limit.

    A number that the wording itself contains goes before one that stands near it.

    Args:
        text: The text of the whole error, from `_plain`.
        matches: The matches of one wording for an overflow, at least one.

    Returns:
        The overflow. It has no numbers if the matches name different limits, because
        nobody knows which of the limits is the provider's.
    """
    limits = {_read_group(match, "limit") for match in matches}
    if len(limits) > 1:
        return Overflow()
    limit_tokens = limits.pop()  # The only limit; None if the wording has no limit.

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

    # A provider names the output only if the output counts against the limit.
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

    The first case that applies decides:

    - If the text has a number of prompt and output together that is above the output:
      the difference. "requested 9000 tokens" with an output of 1000 -> 8000.
    - If the text has a number of prompt tokens, and the limit shows that vLLM has
      stopped counting there: None.
    - If the text has a number of prompt tokens, and vLLM is not known to have stopped
      counting: this number.
    - If the text has neither number: None.

    Args:
        text: The text of the error near the limit.
        limit_tokens: The limit; None if unknown.
        output_tokens: The output that the request asked for; 0 if unknown.

    Returns:
        The tokens of the prompt; None if the error does not tell them.
    """
    total_tokens = _find_count(TOTALS, text)
    if total_tokens is not None and total_tokens > output_tokens:
        return total_tokens - output_tokens

    counted_tokens = _find_count(CAPPED_PROMPTS, text)
    if counted_tokens is None:
        return None
    if limit_tokens is None:
        # Nothing shows that vLLM has stopped counting, so the number is used.
        return counted_tokens

    # vLLM may stop counting a prompt that is too long, with one token more than fits
    # beside the output. Then the prompt may have any size above this count.
    fitting_tokens = limit_tokens - output_tokens
    has_stopped_counting = counted_tokens == fitting_tokens + 1
    return None if has_stopped_counting else counted_tokens


def _find_count(wordings: tuple[str, ...], text: str) -> int | None:
    """Returns the count in the first wording that matches; None if none matches.

    Args:
        wordings: Wordings with a `<count>`, in the order in which they are tried.
        text: The text of the error near the limit.
    """
    for pattern in compile_wordings(wordings):
        match = pattern.search(text)
        if match:
            return _read_tokens(match["count"])
    return None


def _read_group(match: re.Match[str], name: str) -> int | None:
    """Returns a number in the match of a wording; None if the wording lacks the number.

    Args:
        match: The match.
        name: The name of the number in the wording: "limit", "prompt" or "output".
    """
    return _read_tokens(match.groupdict().get(name))


def _read_tokens(digits: str | None) -> int | None:
    """Reads a number such as "128,000" or "128_000".

    Returns:
        The number; None for no digits, and for 0 or a number above
        `_MOST_COUNT_TOKENS`, which cannot be a count of tokens.
    """
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
    """Returns the text of an error or of one of its fields.

    The result is "" if the text cannot be read, or if a field has a type that is not
    read, such as int.
    """
    with suppress(Exception):
        if isinstance(source, bytes):
            return source.decode(errors="replace")
        if isinstance(source, str | dict | list | BaseException):
            # If `__str__` of an error returns an instance of a subclass of str, methods
            # such as `lower` may raise. `join` makes a plain str of the instance.
            return "".join([str(source)])
    return ""


def _attribute(source: object, name: str) -> object:
    """Returns an attribute; None if it does not exist, or if access to it raises."""
    with suppress(Exception):
        return getattr(source, name, None)
    return None


def _errors_in(error: BaseException, name: str) -> list[BaseException]:
    """Returns the errors in an attribute, which has one error, several or none."""
    value = _attribute(error, name)
    with suppress(Exception):  # `isinstance` asks an object for its class.
        values = value if isinstance(value, list | tuple) else (value,)
        return [linked for linked in values if isinstance(linked, BaseException)]
    return []
