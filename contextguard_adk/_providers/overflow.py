"""Recognizes errors that say a request is too long, and reads their numbers.

An error is searched for the wordings of providers (`wordings.py`). It may quote the
request, so words and numbers that stand in the request prove nothing.
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

# Providers may echo the request. Their own words stand before or after it.
_MOST_READ_CHARS = 40_000
_END_CHARS = 20_000

# The numbers of a provider stand in the sentence of the limit, or in one beside it.
_CHARS_BEFORE = 300
_CHARS_AFTER = 400


@dataclass(frozen=True)
class Overflow:
    """A provider refused a request because it does not fit the context window.

    A number that the provider did not name is None, and so is one that it named twice
    and differently.

    Attributes:
        limit_tokens: The context window, or the limit of a `period`.
        prompt_tokens: The size of the request.
        output_tokens: The output that the request asked for.
        is_input_plus_output: Whether a smaller output would help.
        in_bytes: Whether the limit counts bytes; nothing is known about tokens.
        is_quotation: Whether the words of the error may all be quoted from the request;
            nothing is known about tokens.
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


_BETWEEN_WORDS = re.compile(r"[\W_]+")

_Reading = Overflow | Literal["refused"] | None
"""How an error reads: an overflow, a refusal for another reason, or neither."""

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

    An error about a rate limit, a quota or the reserved output alone is no overflow,
    whatever its cause says. A rate limit below the size of the request is an overflow,
    since no wait helps. If an error says neither, the errors linked to it are read.

    Args:
        error: What the call raised.
        contents: The messages of the request. Numbers and other reasons that the error
            may quote from them do not count. A quoted overflow counts.
        sent_tokens: The estimated size of the request. A rate limit is compared with it
            if the provider does not name the size.
    """
    sent = _Sent(contents, sent_tokens)
    reading = _ErrorChain(sent).read(error)
    if not isinstance(reading, Overflow):
        return None

    # LiteLLM's errors name the model that refused.
    model = _attribute(error, "model")
    return replace(reading, model=model) if isinstance(model, str) else reading


class _Sent:
    """The request that was refused; its text is read only if it is needed."""

    def __init__(self, contents: Iterable[types.Content], tokens: int) -> None:
        self._contents = contents
        self.tokens = tokens

    @cached_property
    def _letters(self) -> str:
        """The letters and digits of its text, without spaces and marks.

        So a quotation is found even if it reaches from one part into the next.
        """
        texts = [
            part_text(part)
            for content in self._contents
            for part in content.parts or ()
        ]
        text = b" ".join(texts).decode(errors="replace")
        return _BETWEEN_WORDS.sub("", _plain(text))

    def find_own(self, pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
        """Finds the matches in the text of an error that the request does not contain.

        Their words are the provider's own. All other matches may be quotations.
        """
        own_matches = list[re.Match[str]]()
        for match in itertools.islice(pattern.finditer(text), _MOST_MATCHES):
            letters = _BETWEEN_WORDS.sub("", match[0])
            if letters not in self._letters:
                own_matches.append(match)
        return own_matches


class _ErrorChain:
    """Reads an error and the errors linked to it, each of them once."""

    def __init__(self, sent: _Sent) -> None:
        self._sent = sent
        self._seen = set[int]()

    def read(self, error: BaseException) -> _Reading:
        """Returns the reading of an error and of the errors linked to it.

        The first of these that says anything decides:

        1. the error itself, its cause, and the original error of a broken stream
        2. the errors of a group
        3. the error in whose handling this one was raised

        An error that was read before says nothing, and so does any error after the
        first `_MOST_ERRORS`.
        """
        if id(error) in self._seen or len(self._seen) >= _MOST_ERRORS:
            return None
        self._seen.add(id(error))

        own_reading = _read_error(error, self._sent)
        if not _is_rate(own_reading) and _has_rate_status(error):
            own_reading = "refused"

        # `original_exception` is LiteLLM's, for a stream that broke off.
        readings = [own_reading]
        readings += self._read_linked(error, "__cause__")
        readings += self._read_linked(error, "original_exception")

        # A rate limit goes before a refusal, and a refusal before other overflows.
        for reading in readings:
            if _is_rate(reading):
                return reading
        if "refused" in readings:
            return "refused"
        overflow = _choose(readings)
        if overflow is not None:
            return overflow

        group_reading = _choose(self._read_linked(error, "exceptions"))
        if group_reading is not None:
            return group_reading

        # `raise ... from None` says that the context does not matter.
        if _attribute(error, "__suppress_context__"):
            return None
        return _choose(self._read_linked(error, "__context__"))

    def _read_linked(self, error: BaseException, name: str) -> list[_Reading]:
        """Returns the readings of the errors in an attribute of an error."""
        return [self.read(linked) for linked in _errors_in(error, name)]


def _choose(readings: list[_Reading]) -> _Reading:
    """Returns the overflow with most numbers, else a refusal, else None."""
    overflows = [reading for reading in readings if isinstance(reading, Overflow)]
    if overflows:
        # A wrapper may have cut off the numbers that its cause still has.
        return max(overflows, key=_count_facts)
    return "refused" if "refused" in readings else None


def _count_facts(overflow: Overflow) -> int:
    """Returns how many fields of an overflow are not None."""
    return sum(1 for value in astuple(overflow) if value is not None)


def _is_rate(reading: _Reading) -> bool:
    """Returns whether a reading is the overflow of a rate limit."""
    return isinstance(reading, Overflow) and bool(reading.period)


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
    if _find_first(REFUSALS, text, sent):
        return "refused"

    limit_matches = _find_first(LIMITS, text, sent)
    if limit_matches:
        return _read_numbers(text, limit_matches)
    if _find_first(PAYLOADS, text, sent):
        return Overflow(in_bytes=True)

    # Last: LiteLLM reports the other overflows, too, as an exceeded context window.
    limitless_matches = _find_first(LIMITLESS, text, sent)
    if limitless_matches:
        return _read_numbers(text, limitless_matches)

    # None of these words are the provider's own for certain. The request may have them.
    for pattern in compile_wordings(LIMITS + PAYLOADS + LIMITLESS):
        if pattern.search(text):
            return Overflow(is_quotation=True)
    return None


def _error_text(error: BaseException) -> str:
    """Joins the texts of an error: its message, its fields, and the response's body."""
    sources: list[object] = [error]
    for name in ("message", "body", "code", "details"):
        sources.append(_attribute(error, name))

    response = _attribute(error, "response")
    # In `requests` False means that the body is unread: `text` would wait for it.
    is_unread = _attribute(response, "_content") is False
    if not is_unread:
        sources.append(_attribute(response, "text"))

    # The keys of a dict keep their order, and each text once.
    texts = dict.fromkeys(_text_of(source) for source in sources)
    return " | ".join([_shorten(text) for text in texts])


def _shorten(text: str) -> str:
    """Keeps the beginning and the end of a long text."""
    if len(text) <= _MOST_READ_CHARS:
        return text
    return f"{text[:_END_CHARS]} ... {text[-_END_CHARS:]}"


def _find_first(
    wordings: tuple[str, ...], text: str, sent: _Sent
) -> list[re.Match[str]]:
    """Returns the provider's own matches of the first wording that has any.

    Args:
        wordings: The wordings, in the order in which they are tried.
        text: The text of the error.
        sent: The request, which the text may quote.
    """
    for pattern in compile_wordings(wordings):
        matches = sent.find_own(pattern, text)
        if matches:
            return matches
    return []


def _read_rate(text: str, sent: _Sent) -> Overflow | None:
    """Reads a rate limit that is below the request; None if a wait may help."""
    for pattern in compile_wordings(RATES):
        for match in sent.find_own(pattern, text):
            numbers = match.groupdict()
            limit_tokens = _tokens(numbers["limit"])
            if limit_tokens is None or limit_tokens < MIN_LIMIT_TOKENS:
                continue

            named_tokens = _tokens(numbers.get("prompt"))
            request_tokens = named_tokens or sent.tokens
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
    """Reads the limit of an error, and its counts of prompt and output.

    Args:
        text: The text of the whole error.
        matches: The matches of one wording which says that the request is too long. A
            wording may have numbers.

    Returns:
        The overflow; without numbers if the matches name different limits, since one
        of these is a quotation.
    """
    limits = {_tokens(match.groupdict().get("limit")) for match in matches}
    if len(limits) > 1:
        return Overflow()
    limit = limits.pop()

    # Counts that the wording itself does not have stand near it.
    start, end = matches[0].span()
    near_text = text[max(0, start - _CHARS_BEFORE) : end + _CHARS_AFTER]
    numbers = matches[0].groupdict()
    output = _tokens(numbers.get("output")) or _find_count(OUTPUTS, near_text)
    prompt = _tokens(numbers.get("prompt")) or _find_count(PROMPTS, near_text)
    if prompt is None:
        prompt = _derive_prompt(near_text, limit, output or 0)

    is_sum = SUM.search(near_text) is not None
    return Overflow(
        limit_tokens=limit if limit and limit >= MIN_LIMIT_TOKENS else None,
        prompt_tokens=prompt,
        output_tokens=output,
        is_input_plus_output=output is not None or is_sum,
    )


def _derive_prompt(text: str, limit: int | None, output: int) -> int | None:
    """Returns the tokens of a prompt that an error does not name clearly.

    They are the total of prompt and output less the output, or else a count at which
    the server may have stopped counting. None means that the error has neither.

    Args:
        text: The text of the error near its limit.
        limit: The limit in tokens; None if unknown.
        output: The tokens of the output; 0 if unknown.
    """
    total = _find_count(TOTALS, text)
    if total and total > output:
        return total - output

    capped_prompt = _find_count(CAPPED_PROMPTS, text)
    if capped_prompt is None:
        return None
    # One token too many with the output: the server has stopped counting there.
    has_stopped = capped_prompt + output - 1 == limit
    return None if has_stopped else capped_prompt


def _find_count(wordings: tuple[str, ...], text: str) -> int | None:
    """Returns the count in the first wording that a text has; None if it has none."""
    for pattern in compile_wordings(wordings):
        match = pattern.search(text)
        if match:
            return _tokens(match["count"])
    return None


def _tokens(digits: str | None) -> int | None:
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
            return "".join([str(source)])  # A plain str, whatever `str` returned.
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
        return [each for each in values if isinstance(each, BaseException)]
    return []
