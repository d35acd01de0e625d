"""Recognizes a provider's "your request is too long" and reads its numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import cache, cached_property
from typing import Final, Literal

from google.genai import types

from contextguard_adk._measuring.tokens import part_text

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

    def find_own(self, pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
        """Finds what an error says, and did not read in the request."""
        return [each for each in pattern.finditer(text) if each[0] not in self._text]


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
    if rate := _read_rate(text, sent):
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
            if limit and (requested or sent.tokens) > limit:
                periods = (each for each in ("day", "hour") if each in match[0])
                period = next(periods, "minute")
                return Overflow(limit, requested, period=period)
    return None


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


@cache  # Most runs need none of them.
def compile_wordings(wordings: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Compiles expressions for text in lower case, on one line, without backslashes."""
    number = r"[0-9](?:[0-9]|[,_](?=[0-9])){0,14}+"
    named = (re.sub("<([a-z]+)>", rf"(?P<\1>{number})", each) for each in wordings)
    return tuple(re.compile(each.replace("<_>", number)) for each in named)


# What a key may send in a minute, an hour or a day.
RATES: Final = (
    r"tokens per (?:min(?:ute)?|hour|day)\b[^:]{0,30}: limit:? <limit>,"
    r"(?: used:? <_>,)? requested:? <prompt>",
    r"rate limit (?:of|for this model is) <limit> (?:input )?"
    r"tokens per (?:min(?:ute)?|hour|day)\b",
    r"input_token_count, limit: <limit>",
    r"tpm limit=<limit>",
)

REFUSALS: Final = (
    # Rate limits and quotas: the same request may pass in a minute.
    r"rate[ _-]?limit[ _-]?(?:error|exceeded|reached)",
    r"rate limit of <_>",
    r"tokens per (?:min|hour|day)",
    r"\(tp[md]\)",
    r"too many requests",
    r"too many tokens[^.]{0,40}(?:wait|try again)",
    r"throttlingexception",
    r"resource_exhausted",
    r"(?:error code|status code|status|http):? 429\b",
    # A plan, not a window.
    r"extra usage is required",
    # The reserved output alone is too large: a shorter history changes nothing.
    r"maxoutputtokens value of",
    r"max_[a-z_]{0,20}tokens[^.]{0,40}(?:exceeds the limit|only supports up to)",
    r"too many tokens: max tokens must be",
    # A name or an id, which LiteLLM takes for the prompt.
    r"(?:expected a string with maximum length|expected maxlength:) [0-9]{1,4}\b",
)

# The first that matches is read: special wordings stand before the general ones.
LIMITS: Final = (
    r"exceed context limit: <prompt> \+ <output> > <limit>",
    r"prompt is too long: <prompt> tokens > <limit> maximum",
    r"prompt is too long: <prompt>, model maximum context length: <limit>",
    r"configured limit of <limit> tokens",
    r"maximum number of tokens allowed \(?<limit>",
    r"model only supports up to <limit>(?! (?!tokens|input)[a-z])",
    r"too large for model with <limit> maximum context length",
    r"body too large for \S{1,80} model\. max size: <limit> tokens",
    r"context length (?:is|of) only <limit> tokens",
    r"maximum (?:model length of|prompt length is) <limit>",
    r"too long to fit into the model \(context length <limit>",
    r"(?:available|larger than the max) context size \(<limit>",
    r"n_prompt_tokens[\"': ]{1,4}<prompt>[\"', ]{1,4}n_ctx[\"': ]{1,4}<limit>",
    r"n_keep: <_>[>= ]{1,4}n_ctx: <limit>",
    r"exceed context window of <limit>",
    r"longer than the model'?s (?:maximum )?context length \(<limit> tokens\)",
    r"model token limit: <limit>",
    r"input length should be \[<_>, ?<limit>\]",
    r"input length \(?<prompt>(?: tokens)?\)? exceeds (?:the )?maximum (?:allowed )?"
    r"(?:input )?length (?:of )?\(?<limit>",
    r"inputs tokens \+ max_new_tokens must be <= <limit>",
    r"inputs must have less than <limit> tokens",
    r"tokens (?:in the prompt|\(prompt and prediction\)) cannot exceed <limit>",
    r"size limit exceeded by <_> tokens.{0,80}the limit for this model is <limit>",
    r"input tokens <prompt> cannot exceed the total tokens limit <limit>",
    r"prompt tokens \(<prompt>\) exceed model maximum \(<limit>\)",
    r"max input tokens: <limit>, request input token count: <prompt>",
    r"input tokens \(<prompt>\) has exceeded max_prompt_tokens \(<limit>\)",
    r"current length is <prompt> while limit is <limit>",
    r"maximum context length:? (?:for this model )?(?:is |of )?\(?<limit>",
    r"exceeds the limit of <limit>(?! ?(?:[kmg]i?b\b|byte|char|image|message|tool|file"
    r"|item|page|second|request|output))",
)

LIMITLESS: Final = (
    r"context[ _]?(?:length|window)[ _]?exceeded",
    r"exceed_context_size_error|model_max_prompt_tokens_exceeded",
    r"exceeds? (?:the |this )?(?:available |model'?s )?(?:max(?:imum)? )?"
    r"context (?:window|length|limit|size)",
    r"(?:greater|longer) than the (?:model'?s )?(?:maximum )?context length",
    r"larger than the max context size",
    r"context size has been exceeded|context window exceeds limit",
    r"exceeded model token limit",
    r"(?:prompt|input) is too long|prompt too long; exceeded",
    r"prompt exceeds max(?:imum)? length",
    r"exceeds the maximum number of tokens allowed",
    r"exceed max message tokens",
    r"input tokens (?:exceed the configured limit|exceeded:)",
    r"number of input tokens exceeds maximum length",
    r"prompt has too many tokens|too many input tokens",
    r"too many tokens: (?:total|size limit|minimal context|multi-hop)",
    r"reduce the length of the (?:messages|prompt|input)",
)

# Bytes and characters: a payload is too large, whatever the window.
PAYLOADS: Final = (
    r"request_too_large",
    r"(?:request entity|payload|content|request body)(?: is)? too large",
    r"request payload size exceeds the limit",
    r"(?:request|payload|body)[a-z ]{0,20}"
    r"(?: \(?<_> ?(?:bytes|[kmg]i?b)\)?)? exceeds (?:the )?"
    r"(?:maximum|limit|max)[a-z ]{0,20}:? ?<_> ?(?:bytes|[kmg]i?b)\b",
    r"string too long\. expected a string with maximum length [0-9]",
    r"expected maxlength: [0-9]",
    r"string value length \(<_>\) exceeds the maximum allowed",
)

TOTALS: Final = (r"requested (?:about |a total of )?<count> tokens",)
OUTPUTS: Final = (
    r"<count> (?:tokens )?(?:in|for) the (?:completion|output)",
    r"requested <count> output tokens",
    r"plus <count> '?max_tokens",
    r"max_completion_tokens'? is too large: <count>",
    r"inputs tokens and <count> max_new_tokens",
)
PROMPTS: Final = (
    r"(?:input|prompt) token count (?:is |of |\()<count>",
    r"(?:request|input|prompt|requested tokens) \(<count>(?: tokens)?\)",
    r"input length \(?<count>",
    r"prompt \((?:total )?length <count>\)",
    r"prompt length of <count>",
    r"(?:prompt|request) contains <count> (?:input )?tokens",
    r"resulted in <count> tokens",
    r"\(requested: <count>\)",
    r"<count> tokens from the input messages",
    r"in the prompt cannot exceed <_> - received <count>",
    r"must have less than <_> tokens\. given: <count>",
    r"given: <count> inputs tokens",
)
# vLLM may stop counting one token past what fits.
CAPPED_PROMPTS: Final = (r"(?:passed|request has) <count> input tokens",)
SUM: Final = re.compile(r"\+ max_new_tokens must be|\(prompt and prediction\)")
