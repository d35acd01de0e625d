"""Recognizes errors that say a request is too long, and reads their numbers.

An error is read in the words of providers (`wordings.py`). It may quote the request, so
words and numbers that stand in the request prove nothing.
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

# Gateways nest JSON in JSON, and some servers write `>` and `'` in ways safe for HTML.
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
    """Reads whether a model call failed because its request was too long; never raises.

    An error about a rate limit, a quota or the reserved output alone is no overflow,
    whatever its cause says. A rate limit below the request itself is one, since no wait
    helps. If an error says nothing of either, the errors linked to it are read.

    Args:
        error: What the call raised.
        contents: The messages of the request. Their words in the error may be a
            quotation: then no number and no refusal counts, but the overflow does.
        sent_tokens: The estimated size of the request, which a rate limit is compared
            with if the provider does not name the size.
    """
    sent = _Sent(contents, sent_tokens)
    reading = _ErrorChain(sent).read(error)
    if not isinstance(reading, Overflow):
        return None

    model = _attribute(error, "model")  # LiteLLM's errors have it.
    return replace(reading, model=model) if isinstance(model, str) else reading


class _Sent:
    """The text of a request, read only if an error needs to be compared with it."""

    def __init__(self, contents: Iterable[types.Content], tokens: int) -> None:
        self._contents = contents
        self.tokens = tokens

    @cached_property
    def _letters(self) -> str:
        """Its letters and digits: an error may quote parts side by side."""
        texts = [
            part_text(part) for each in self._contents for part in each.parts or ()
        ]
        text = b" ".join(texts).decode(errors="replace")
        return _BETWEEN_WORDS.sub("", _plain(text))

    def find_own(self, pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
        """Finds the matches in an error that do not stand in the request."""
        own = list[re.Match[str]]()
        for match in itertools.islice(pattern.finditer(text), _MOST_MATCHES):
            # Compared with the whole request: a quotation may repeat the words.
            if _BETWEEN_WORDS.sub("", match[0]) not in self._letters:
                own.append(match)
        return own


class _ErrorChain:
    """Reads an error and those linked to it, each of them once."""

    def __init__(self, sent: _Sent) -> None:
        self._sent = sent
        self._seen = set[int]()

    def read(self, error: BaseException) -> _Reading:
        """Returns the reading of an error, or of those linked to it if it has none."""
        if id(error) in self._seen or len(self._seen) >= _MOST_ERRORS:
            return None
        self._seen.add(id(error))

        own = _read_error(error, self._sent)
        if not _is_rate(own) and _has_rate_status(error):
            own = "refused"

        # `original_exception` is LiteLLM's, for a stream that broke off.
        readings = [own]
        readings += self._read_linked(error, "__cause__")
        readings += self._read_linked(error, "original_exception")
        for reading in readings:
            if _is_rate(reading):
                return reading
        if "refused" in readings:
            return "refused"
        if any(readings):
            return _choose(readings)

        grouped = self._read_linked(error, "exceptions")
        if any(grouped):
            return _choose(grouped)
        if _attribute(error, "__suppress_context__"):
            return None
        return _choose(self._read_linked(error, "__context__"))

    def _read_linked(self, error: BaseException, name: str) -> list[_Reading]:
        """Reads the errors in an attribute of an error."""
        return [self.read(linked) for linked in _errors_in(error, name)]


def _choose(readings: list[_Reading]) -> _Reading:
    """Returns the overflow that says most, else a refusal, else None."""
    overflows = [each for each in readings if isinstance(each, Overflow)]
    if overflows:
        # A wrapper may have cut off the numbers that its cause still has.
        return max(overflows, key=_count_facts)
    return "refused" if "refused" in readings else None


def _count_facts(overflow: Overflow) -> int:
    """Returns how many fields of an overflow are not None."""
    return sum(1 for value in astuple(overflow) if value is not None)


def _is_rate(reading: _Reading) -> bool:
    """Returns whether it is an overflow of a rate limit."""
    return isinstance(reading, Overflow) and bool(reading.period)


def _has_rate_status(error: BaseException) -> bool:
    """Returns whether an error has the HTTP status of a rate limit."""
    with suppress(Exception):
        for name in ("status_code", "code", "status"):
            if _attribute(error, name) in (429, "429"):
                return True
    return False


def _read_error(error: BaseException, sent: _Sent) -> _Reading:
    """Reads one error, without those linked to it."""
    text = _plain(_error_text(error))
    rate = _read_rate(text, sent)
    if rate is not None:
        return rate
    if _find_first(REFUSALS, text, sent):
        return "refused"

    limits = _find_first(LIMITS, text, sent)
    if limits:
        return _read_numbers(text, limits)
    if _find_first(PAYLOADS, text, sent):
        return Overflow(in_bytes=True)
    # Last, because LiteLLM says of the others, too, that a context window was exceeded.
    limitless = _find_first(LIMITLESS, text, sent)
    if limitless:
        return _read_numbers(text, limitless)

    for pattern in compile_wordings(LIMITS + PAYLOADS + LIMITLESS):
        if pattern.search(text):
            return Overflow(is_quotation=True)
    return None


def _error_text(error: BaseException) -> str:
    """Returns all that an error says, each text of it once."""
    sources: list[object] = [error]
    for name in ("message", "body", "code", "details"):
        sources.append(_attribute(error, name))
    response = _attribute(error, "response")
    # `requests` sets False until it has read the body, and would read it now.
    if _attribute(response, "_content") is not False:
        sources.append(_attribute(response, "text"))

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
    """Returns the matches of the first wording that the error uses itself."""
    for pattern in compile_wordings(wordings):
        matches = sent.find_own(pattern, text)
        if matches:
            return matches
    return []


def _read_rate(text: str, sent: _Sent) -> Overflow | None:
    """Reads a rate limit that is below the request; None if a wait may help."""
    for pattern in compile_wordings(RATES):
        for match in sent.find_own(pattern, text):
            named = match.groupdict()
            limit = _tokens(named["limit"])
            if limit is None or limit < MIN_LIMIT_TOKENS:
                continue

            requested = _tokens(named.get("prompt"))
            if (requested or sent.tokens) > limit:
                period = _name_period(match[0])
                return Overflow(limit, requested, period=period)
    return None


def _name_period(words: str) -> str:
    """Names the period of a rate limit; a minute if the words name none."""
    for period in ("day", "hour"):
        if period in words:
            return period
    return "minute"


def _read_numbers(text: str, matches: list[re.Match[str]]) -> Overflow:
    """Reads the limit and the counts of an error.

    Args:
        text: The whole error.
        matches: All that say the limit in the wording that was found first.
    """
    limits = {_tokens(match.groupdict().get("limit")) for match in matches}
    if len(limits) > 1:  # One of them is a quotation.
        return Overflow()
    limit = limits.pop()

    start, end = matches[0].span()
    near = text[max(0, start - _CHARS_BEFORE) : end + _CHARS_AFTER]
    named = matches[0].groupdict()
    output = _tokens(named.get("output")) or _find_count(OUTPUTS, near)
    prompt = _tokens(named.get("prompt")) or _find_count(PROMPTS, near)
    if prompt is None:
        prompt = _derive_prompt(near, limit, output or 0)

    return Overflow(
        limit_tokens=limit if limit and limit >= MIN_LIMIT_TOKENS else None,
        prompt_tokens=prompt,
        output_tokens=output,
        is_input_plus_output=output is not None or SUM.search(near) is not None,
    )


def _derive_prompt(text: str, limit: int | None, output: int) -> int | None:
    """Returns the tokens of a prompt that an error does not name as such."""
    total = _find_count(TOTALS, text)
    if total and total > output:
        return total - output

    capped = _find_count(CAPPED_PROMPTS, text)
    is_cut_off = capped is not None and capped + output - 1 == limit
    return None if is_cut_off else capped


def _find_count(wordings: tuple[str, ...], text: str) -> int | None:
    """Returns the count in the first wording that a text has."""
    for pattern in compile_wordings(wordings):
        match = pattern.search(text)
        if match:
            return _tokens(match["count"])
    return None


def _tokens(digits: str | None) -> int | None:
    """Returns a number with or without separators; None if it counts no tokens."""
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
    """Returns what a field of an error says; "" if it is no text or cannot be read."""
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
    """Returns the error in an attribute, or the errors if it holds several."""
    value = _attribute(error, name)
    with suppress(Exception):
        linked = value if isinstance(value, list | tuple) else (value,)
        return [each for each in linked if isinstance(each, BaseException)]
    return []
