"""Turning the measure of a request into an estimate of its prompt tokens.

What the provider counted on the call before corrects the heuristic of `tokens`; what
grew since is weighted up by the density of its text.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from google.genai import types

from contextguard_adk.measuring.density import (
    SizedText,
    count_spare_tokens,
    estimate_text_density,
    weighted_tokens,
)
from contextguard_adk.measuring.json_size import json_text, text_bytes
from contextguard_adk.measuring.shortening import TokenCounter
from contextguard_adk.measuring.tokens import (
    PartMeasure,
    estimate_content_tokens,
    measure_part,
    part_text,
)

DEFAULT_CORRECTION = 1.5
"""Real tokens per heuristic token while the provider has counted nothing."""

MAX_CORRECTION = 5.0

MeasurePart = Callable[[types.Part | None], PartMeasure]

_MAX_TOKENIZER_RATIO = 2.0
_NOTABLE_GROWTH_RATIO = 0.05
# Of the least that the scripts allow, where English counts bytes / 4; o200k_base takes
# 0.76 of that for the Universal Declaration of Human Rights.
_BELIEVED_RATIO = 0.75
_NOTABLY_LESS_RATIO = 0.95  # Prose counts 0.98: to look at its script gains nothing.


def correction_factor(
    real_tokens: int | None,
    last_heuristic_tokens: int | None,
    *,
    default: float = DEFAULT_CORRECTION,
) -> float:
    """Returns how many real tokens a heuristic token stood for on the last call.

    Args:
        real_tokens: Prompt tokens that the provider reported; None or 0 if unknown.
        last_heuristic_tokens: The heuristic of the same request; None or 0 if unknown.
        default: The factor if either is unknown.

    Returns:
        The ratio, at least 1.0 and at most 5.0: one odd call shall neither shrink the
        estimate nor blow it up.
    """
    if not real_tokens or not last_heuristic_tokens:
        return default
    return min(max(real_tokens / last_heuristic_tokens, 1.0), MAX_CORRECTION)


def calibrated_tokens(
    heuristic_tokens: int,
    real_tokens: int | None,
    last_heuristic_tokens: int | None,
    *,
    default: float = DEFAULT_CORRECTION,
) -> int:
    """Estimates a request by the documented rule, `max(real, heuristic x correction)`.

    The real count is a floor only while the request has not shrunk since: after a
    rewind or a compaction it speaks of contents that are gone.

    Args:
        heuristic_tokens: The heuristic of the request now.
        real_tokens: As for `correction_factor`.
        last_heuristic_tokens: As for `correction_factor`.
        default: As for `correction_factor`.
    """
    correction = correction_factor(real_tokens, last_heuristic_tokens, default=default)
    scaled_tokens = int(heuristic_tokens * correction)
    has_shrunk = heuristic_tokens < (last_heuristic_tokens or 0)
    return scaled_tokens if has_shrunk else max(scaled_tokens, real_tokens or 0)


def _newest_parts(
    contents: Sequence[types.Content], measure: MeasurePart, *, in_ascii: bool = False
) -> Iterator[SizedText]:
    """Yields from the end the text of each part, or of each whose text is ASCII."""
    for content in reversed(contents):
        for part in reversed(content.parts or ()):
            text = part.text if part is not None else None
            if in_ascii and text and not text.isascii():
                continue
            text_bytes, media_bytes, _, is_ascii = measure(part)
            if is_ascii or not in_ascii:
                yield SizedText(text_bytes, media_bytes, partial(part_text, part))


def estimate_growth_tokens(
    contents: Sequence[types.Content],
    growth_heuristic_tokens: int,
    measure: MeasurePart = measure_part,
) -> int:
    """Estimates what a request grew by, weighted by the density of its newest text.

    A correction learned on prose says nothing of the base64 that a tool has just
    returned. The newest contents are taken to be what grew; a bounded sample of their
    text is judged by `estimate_text_density`.

    Args:
        contents: The contents of the request.
        growth_heuristic_tokens: Its heuristic less that of the last call.
        measure: Gives what `measure_part` does.

    Returns:
        Tokens, never less than `growth_heuristic_tokens`; 0 if nothing grew.
    """
    if growth_heuristic_tokens <= 0:
        return 0
    parts = _newest_parts(contents, measure)
    weighted = weighted_tokens(parts, growth_heuristic_tokens)
    return max(growth_heuristic_tokens, int(weighted))


def _grown_tokens(
    real_tokens: int,
    last_heuristic_tokens: int,
    growth_tokens: int,
    contents: Sequence[types.Content],
    measure: MeasurePart,
) -> int:
    """Returns the real count plus the growth in tokens of the provider's own size.

    The density is that of o200k_base. Where the growth matters, the older contents show
    how many of the provider's tokens stand for one of those: some count a third more.
    """
    parts = _newest_parts(contents, measure)
    weighted = weighted_tokens(parts, growth_tokens)
    if growth_tokens >= last_heuristic_tokens * _NOTABLE_GROWTH_RATIO:
        ratio = real_tokens / weighted_tokens(parts, last_heuristic_tokens)
        weighted *= min(max(ratio, 1.0), _MAX_TOKENIZER_RATIO)
    least = growth_tokens
    if growth_tokens < last_heuristic_tokens < real_tokens:
        # A ratio above the limit is mostly that of a small fixed part: it stands in the
        # count, and what grew has the limit at most.
        ratio = min(real_tokens / last_heuristic_tokens, MAX_CORRECTION)
        least = int(growth_tokens * ratio)
    return real_tokens + max(int(weighted), least)


def request_spare_tokens(
    contents: Iterable[types.Content | None],
    config: types.GenerateContentConfig | None = None,
    measure: MeasurePart = measure_part,
) -> int:
    """Returns how far below bytes / 4 the tokens of a request may be by its scripts.

    Args:
        contents: Its contents.
        config: Its configuration; the instruction counts if it is a text.
        measure: Gives what `measure_part` does.

    Returns:
        Tokens; 0 where all is ASCII.
    """
    spare_tokens = 0.0
    instruction = config.system_instruction if config is not None else None
    if isinstance(instruction, str):
        spare_tokens += count_spare_tokens(json_text(instruction))
    for content in contents:
        parts = content.parts if content is not None else None
        for part in parts or ():
            text = part.text if part is not None else None
            if not text or not text.isascii():
                spare_tokens += measure(part).spare_tokens
    return int(spare_tokens)


def _newest_contents(
    contents: Sequence[types.Content], heuristic_tokens: int
) -> Sequence[types.Content]:
    """The newest contents that take at least so many tokens by bytes / 4."""
    start = len(contents)
    while start and heuristic_tokens > 0:
        start -= 1
        heuristic_tokens -= estimate_content_tokens(contents[start])
    return contents[start:]


def _dense_tokens(contents: Sequence[types.Content], measure: MeasurePart) -> int:
    """What the ASCII parts of contents take beyond bytes / 4, by their density."""
    parts = list(_newest_parts(contents, measure, in_ascii=True))
    heuristic_tokens = sum(part.size_bytes + part.other_bytes for part in parts) // 4
    weighted = weighted_tokens(parts, heuristic_tokens)
    return max(int(weighted) - heuristic_tokens, 0)


def _lowered_tokens(
    heuristic_tokens: int,
    real_tokens: int,
    last_heuristic_tokens: int,
    spare_tokens: int,
    grown_spare_tokens: int,
) -> int | None:
    """Returns what replaces the documented rule where scripts explain a low count.

    Cyrillic, Greek, Arabic or Devanagari take 0.4 to 0.8 tokens for each four bytes.
    Below what they are known to take the result never is, and ASCII counts in full. A
    count that even they do not explain leaves something out, such as what a cache
    held: it is not believed. What grew was not counted and explains nothing.

    Returns:
        Tokens, without what growth adds; None where the documented rule stands.
    """
    growth_tokens = max(heuristic_tokens - last_heuristic_tokens, 0)
    known_tokens = heuristic_tokens - growth_tokens
    carried_tokens = int(real_tokens * known_tokens / last_heuristic_tokens)
    counted_spare = spare_tokens - grown_spare_tokens
    counted_least = known_tokens - counted_spare
    if counted_spare <= 0 or carried_tokens < counted_least * _BELIEVED_RATIO:
        return None
    return max(carried_tokens, heuristic_tokens - spare_tokens)


def estimate_prompt_tokens(
    heuristic_tokens: int,
    real_tokens: int | None,
    last_heuristic_tokens: int | None,
    contents: Sequence[types.Content],
    *,
    default: float = DEFAULT_CORRECTION,
    config: types.GenerateContentConfig | None = None,
    measure: MeasurePart = measure_part,
) -> int:
    """Estimates the prompt tokens of a request before it is sent.

    The larger of the documented rule (`calibrated_tokens`) and of what the provider
    counted last plus what grew since, weighted by its density. Where nothing is known
    the density of the whole request stands in for the second.

    The documented rule takes no count for less than bytes / 4. Where the provider
    counted less and the scripts of the text explain it, the count stands; what grew
    since counts bytes / 4 all the same. A request in ASCII, Latin letters, Han, kana or
    Hangul is never below bytes / 4.

    Args:
        heuristic_tokens: The heuristic of the request now.
        real_tokens: As for `correction_factor`.
        last_heuristic_tokens: As for `correction_factor`.
        contents: The contents of the request.
        default: As for `correction_factor`.
        config: Its configuration, for the script of the instruction.
        measure: Gives what `measure_part` does.
    """
    calibrated = calibrated_tokens(
        heuristic_tokens, real_tokens, last_heuristic_tokens, default=default
    )
    if not real_tokens or not last_heuristic_tokens:
        grown = estimate_growth_tokens(contents, heuristic_tokens, measure)
        return max(calibrated, grown)
    growth_tokens = heuristic_tokens - last_heuristic_tokens
    if real_tokens < last_heuristic_tokens * _NOTABLY_LESS_RATIO:
        spare_tokens = request_spare_tokens(contents, config, measure)
        newest = _newest_contents(contents, growth_tokens) if spare_tokens else ()
        lowered = _lowered_tokens(
            heuristic_tokens,
            real_tokens,
            last_heuristic_tokens,
            spare_tokens,
            request_spare_tokens(newest, None, measure),
        )
        if lowered is not None:
            # JSON or base64 may have come in the place of what was counted.
            least = heuristic_tokens - spare_tokens + _dense_tokens(contents, measure)
            calibrated = min(calibrated, max(lowered, least))
    if growth_tokens <= 0:
        return calibrated
    return max(
        calibrated,
        _grown_tokens(
            real_tokens, last_heuristic_tokens, growth_tokens, contents, measure
        ),
    )


def token_counter(correction: float | None) -> TokenCounter:
    """Counts tokens of texts: bytes / 4, weighted by what is known of the tokenizer.

    Args:
        correction: Real tokens per estimated token; None takes the text's density
            alone.
    """

    def count(text: str) -> int:
        factor = max(correction or 0.0, estimate_text_density(text))
        return math.ceil(text_bytes(text) / 4 * factor)

    return count
