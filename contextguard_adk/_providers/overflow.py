"""Recognizes a provider's "your request is too long" and reads its numbers."""

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


@dataclass(frozen=True)
class Overflow:
    """A provider refused a request because it does not fit the context window.

    What it did not name, or named twice and differently, is None. A smaller reserved
    output than `output_tokens` would help where `is_input_plus_output`. Where it is
    `in_bytes` or only `is_quotation` of the request it says nothing about tokens. With
    a `period` ("minute", "hour", "day") the limit is that of what a key may send in it:
    the request alone, with its output, is above it. `model` is who refused it, where
    the error says so: a gateway may have asked another one.
    """

    limit_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    is_input_plus_output: bool = False
    in_bytes: bool = False
    is_quotation: bool = False
    period: str = ""
    model: str = field(default="", compare=False)


_BETWEEN = re.compile(r"[\W_]+")  # Words.

_Reading = Overflow | Literal["refused"] | None

# Gateways nest JSON in JSON, and some servers write `>` and `'` in ways safe for HTML.
_ESCAPES: Final = {
    r"\n": " ", r"\u003e": ">", r"\u003c": "<", r"\u0027": "'",
    "&gt;": ">", "&lt;": "<", "\u2019": "'", "\\": "", "`": "",
}  # fmt: skip


def parse_overflow(
    error: BaseException,
    contents: Iterable[types.Content] = (),
    sent_tokens: int = 0,
) -> Overflow | None:
    """Reads whether a model call failed because its request was too long; never raises.

    A message about a rate limit, a quota or the reserved output alone is no overflow,
    nor is its cause; but for a rate limit below the request itself, by the provider's
    figure or, where it names none, by the estimate `sent_tokens`. Of an error that says
    neither, linked errors are read. Words that stand in the `contents` of the request
    may be a quotation: no number in them counts, and no refusal; that the request was
    too long is believed all the same.
    """
    reading = _read_linked(error, set(), _Sent(contents, sent_tokens))
    if not isinstance(reading, Overflow):
        return None
    model = _attribute(error, "model")  # LiteLLM's errors have it.
    return replace(reading, model=model) if isinstance(model, str) else reading


class _Sent:
    """The text of a request, as an error might quote it; most errors are not read."""

    def __init__(self, contents: Iterable[types.Content], tokens: int) -> None:
        self._contents = contents
        self.tokens = tokens

    @cached_property
    def _text(self) -> str:
        parts = (part for each in self._contents for part in each.parts or ())
        return _plain(b" ".join(map(part_text, parts)).decode(errors="replace"))

    @cached_property
    def _letters(self) -> str:
        """Its letters and digits: an error may quote parts side by side."""
        return _BETWEEN.sub("", self._text)

    def find_own(self, pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
        """Finds what an error says, and did not read in the request."""
        # Whoever says it more often is quoting: each is looked for in the whole text.
        found = itertools.islice(pattern.finditer(text), 50)
        return [m for m in found if _BETWEEN.sub("", m[0]) not in self._letters]


def _read_linked(error: BaseException, seen: set[int], sent: _Sent) -> _Reading:
    if id(error) in seen or len(seen) >= 32:
        return None
    seen.add(id(error))
    own = _read_error(error, sent)
    if not _is_rate(own) and _has_rate_status(error):
        own = "refused"

    def read_all(name: str) -> list[_Reading]:
        return [_read_linked(each, seen, sent) for each in _errors_in(error, name)]

    # `original_exception` is LiteLLM's, for what broke off in mid-stream.
    readings = [own, *read_all("__cause__"), *read_all("original_exception")]
    if rates := [each for each in readings if _is_rate(each)]:
        return rates[0]
    if "refused" in readings:
        return "refused"
    if not any(readings):
        readings = read_all("exceptions")
    if not any(readings) and not _attribute(error, "__suppress_context__"):
        readings = read_all("__context__")
    overflows = [each for each in readings if isinstance(each, Overflow)]
    if not overflows:
        return "refused" if "refused" in readings else None
    # A wrapper may have cut off the numbers that its cause still has.
    return max(overflows, key=lambda each: sum(x is not None for x in astuple(each)))


def _is_rate(reading: _Reading) -> bool:
    return isinstance(reading, Overflow) and bool(reading.period)


def _has_rate_status(error: BaseException) -> bool:
    with suppress(Exception):
        names = ("status_code", "code", "status")
        return any(_attribute(error, name) in (429, "429") for name in names)
    return False


def _read_error(error: BaseException, sent: _Sent) -> _Reading:
    names = ("message", "body", "code", "details")
    sources = [error, *(_attribute(error, name) for name in names)]
    response = _attribute(error, "response")
    # `requests` sets False until it has read the body, and would read it now.
    if _attribute(response, "_content") is not False:
        sources.append(_attribute(response, "text"))
    # Providers may echo the request; what they say stands before or after it.
    texts = (
        text if len(text) <= 40_000 else f"{text[:20_000]} ... {text[-20_000:]}"
        for text in dict.fromkeys(map(_text_of, sources))
    )
    text = _plain(" | ".join(texts))
    rate = _read_rate(text, sent)
    if rate is not None:
        return rate
    if any(sent.find_own(pattern, text) for pattern in compile_wordings(REFUSALS)):
        return "refused"
    # LiteLLM calls any of them a context window that was exceeded.
    for wordings in (LIMITS, PAYLOADS, LIMITLESS):
        for pattern in compile_wordings(wordings):
            if matches := sent.find_own(pattern, text):
                if wordings is PAYLOADS:
                    return Overflow(in_bytes=True)
                return _read_numbers(text, matches)
    every = compile_wordings(LIMITS + PAYLOADS + LIMITLESS)
    is_quotation = any(pattern.search(text) for pattern in every)
    return Overflow(is_quotation=True) if is_quotation else None


def _read_rate(text: str, sent: _Sent) -> Overflow | None:
    """Reads a rate limit that is below the request; None where a wait may help."""
    for pattern in compile_wordings(RATES):
        for match in sent.find_own(pattern, text):
            limit = _tokens(match["limit"])
            requested = _tokens(match.groupdict().get("prompt"))
            if limit is None or limit < MIN_LIMIT_TOKENS:
                continue
            if (requested or sent.tokens) > limit:
                return Overflow(limit, requested, period=_name_period(match[0]))
    return None


def _name_period(said: str) -> str:
    return next((each for each in ("day", "hour") if each in said), "minute")


def _read_numbers(text: str, matches: list[re.Match[str]]) -> Overflow:
    named = [match.groupdict() for match in matches]
    limits = {_tokens(each.get("limit")) for each in named}
    if len(limits) > 1:  # One of them is a quotation.
        return Overflow()
    limit = limits.pop()
    # A provider's counts stand in the sentence of the limit or in one beside it.
    start, end = matches[0].span()
    near = text[max(0, start - 300) : end + 400]
    output = _tokens(named[0].get("output")) or _find_count(OUTPUTS, near)
    prompt = _tokens(named[0].get("prompt")) or _find_count(PROMPTS, near)
    if prompt is None and (total := _find_count(TOTALS, near)):
        prompt = max(0, total - (output or 0)) or None
    if prompt is None and (capped := _find_count(CAPPED_PROMPTS, near)):
        prompt = None if capped + (output or 0) - 1 == limit else capped
    return Overflow(
        limit_tokens=limit if limit and limit >= MIN_LIMIT_TOKENS else None,
        prompt_tokens=prompt,
        output_tokens=output,
        is_input_plus_output=output is not None or SUM.search(near) is not None,
    )


def _find_count(wordings: tuple[str, ...], text: str) -> int | None:
    matches = (pattern.search(text) for pattern in compile_wordings(wordings))
    return next((_tokens(match["count"]) for match in matches if match), None)


def _tokens(digits: str | None) -> int | None:
    count = int(re.sub("[,_]", "", digits)) if digits else 0
    return count if 0 < count <= 100_000_000 else None


def _plain(text: str) -> str:
    text = text.lower()
    for escaped, plain in _ESCAPES.items():
        text = text.replace(escaped, plain)
    return " ".join(text.split())


def _text_of(source: object) -> str:
    with suppress(Exception):
        if isinstance(source, bytes):
            return source.decode(errors="replace")
        if isinstance(source, str | dict | list | BaseException):
            return "".join((str(source),))  # A plain str, whatever the class.
    return ""


def _attribute(source: object, name: str) -> object:
    with suppress(Exception):
        return getattr(source, name, None)
    return None


def _errors_in(error: BaseException, name: str) -> list[BaseException]:
    value = _attribute(error, name)
    with suppress(Exception):
        linked = value if isinstance(value, list | tuple) else (value,)
        return [each for each in linked if isinstance(each, BaseException)]
    return []
