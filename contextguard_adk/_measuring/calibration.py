"""Turns the measure of a request into an estimate of its prompt tokens."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from google.genai import types

from contextguard_adk._measuring.budgets import TokenCounter, shorten_to_tokens
from contextguard_adk._measuring.density import (
    SizedText,
    estimate_text_density,
    script_discount_tokens,
    weighted_tokens,
)
from contextguard_adk._measuring.tokens import (
    Memo,
    config_texts,
    json_text,
    text_bytes,
)

DEFAULT_CORRECTION = 1.5
"""Real tokens per heuristic token of what has no text, as images, while the provider
has counted nothing; of a whole request where it was rejected without a count."""

FIRST_MARGIN = 1.15
_CLAUDE_MARGIN = 1.5
"""What a first estimate by the density of the text is multiplied by. Claude's
vocabularies take up to 1.2 times the tokens of o200k_base, since Opus 4.7 up to 1.35
times that (Anthropic's release notes)."""

_MOST_VOCABULARY = 1.35
"""Of other vocabularies: so much has to fit where the threshold is not reached."""

MAX_RATIO = 20.0
"""More real tokens per heuristic token are not believed."""


def correction_factor(real_tokens: int, last_heuristic_tokens: int) -> float:
    """Returns the real tokens per heuristic token of the last call, from 1 to 5."""
    return min(max(real_tokens / last_heuristic_tokens, 1.0), 5.0)


def estimate_prompt_tokens(
    heuristic_tokens: int,
    real_tokens: int | None,
    last_heuristic_tokens: int | None,
    contents: Sequence[types.Content],
    *,
    default: float | None = None,
    config: types.GenerateContentConfig | None = None,
    memo: Memo | None = None,
    margin: float = FIRST_MARGIN,
) -> int:
    """Estimates the prompt tokens of a request before it is sent.

    While nothing is known of the model, not even a `default` correction, the density of
    all text tells. Else it is the larger of the documented rule, `max(real, heuristic x
    correction)`, and of the provider's last count plus what grew since, weighted by its
    density. The real count is no floor for a request that has shrunk: it counts
    contents that are gone. Below bytes / 4 a count only stands where the scripts of the
    text explain it.
    """
    memo = memo or Memo()
    parts = _newest_parts(contents, memo)
    if not real_tokens or not last_heuristic_tokens:
        if default is None:
            text = b"".join(config_texts(config))
            every = [*parts, SizedText(len(text), 0, lambda: text)]
            media_tokens = sum(part.other_bytes for part in every) / 4
            tokens = weighted_tokens(every, heuristic_tokens) - media_tokens
            tokens = tokens * margin + media_tokens * DEFAULT_CORRECTION
            # Vocabularies differ most in the scripts that take few tokens at best:
            # with these it is about 1.5 times bytes / 4, else at least bytes / 4.
            discount_tokens = request_script_discount(contents, config, memo)
            least_tokens = heuristic_tokens + int(0.8 * discount_tokens)
            return max(int(tokens), least_tokens, real_tokens or 0)
        weighted = int(weighted_tokens(parts, heuristic_tokens))
        return max(int(heuristic_tokens * default), real_tokens or 0, weighted)
    correction = correction_factor(real_tokens, last_heuristic_tokens)
    scaled_tokens = int(heuristic_tokens * correction)
    growth_tokens = heuristic_tokens - last_heuristic_tokens
    # Prose counts 0.98: to look at its script gains nothing.
    if real_tokens < last_heuristic_tokens * 0.95:
        known_tokens = min(heuristic_tokens, last_heuristic_tokens)
        carried_tokens = int(real_tokens * known_tokens / last_heuristic_tokens)
        scaled_tokens = _lowered_tokens(
            heuristic_tokens, known_tokens, carried_tokens, contents, config, memo
        )
    if growth_tokens < 0:
        return scaled_tokens
    grown = weighted_tokens(parts, growth_tokens)
    if growth_tokens >= last_heuristic_tokens * 0.05:
        # The contents before those that grew show how many tokens of this provider
        # stand for one of o200k_base: some count a third more.
        ratio = real_tokens / weighted_tokens(parts, last_heuristic_tokens)
        grown *= min(max(ratio, 1.0), 2.0)
    return max(scaled_tokens, real_tokens + max(int(grown), growth_tokens))


def first_margin(model: str, threshold_ratio: float) -> float:
    """Returns the margin of a first estimate, by the threshold's part of the window."""
    least = _CLAUDE_MARGIN if "claude" in model.lower() else FIRST_MARGIN
    return max(least, _MOST_VOCABULARY * threshold_ratio / 0.97)


def _newest_parts(
    contents: Sequence[types.Content], memo: Memo, *, in_ascii: bool = False
) -> Iterator[SizedText]:
    """Yields from the end the text of each part, or of each whose text is ASCII."""
    for content in reversed(contents):
        for part in reversed(content.parts or ()):
            text = part.text if part is not None else None
            if in_ascii and text and not text.isascii():
                continue
            text_bytes, media_bytes, _, is_ascii = memo.measure_part(part)
            if is_ascii or not in_ascii:
                yield SizedText(text_bytes, media_bytes, partial(memo.part_text, part))


def _lowered_tokens(
    heuristic_tokens: int,
    known_tokens: int,
    carried_tokens: int,
    contents: Sequence[types.Content],
    config: types.GenerateContentConfig | None,
    memo: Memo,
) -> int:
    """Returns the heuristic, lowered where scripts explain that the count was lower."""
    start = len(contents)
    grown_tokens = heuristic_tokens - known_tokens
    while start and grown_tokens > 0:  # What grew was not counted: it explains nothing.
        start -= 1
        grown_tokens -= memo.estimate_tokens((contents[start],))
    newest = contents[start:]
    discount_tokens = request_script_discount(contents, config, memo)
    counted_discount = discount_tokens - request_script_discount(newest, None, memo)
    # o200k_base takes 0.76 of the least that scripts allow for the Universal
    # Declaration of Human Rights in English, which counts bytes / 4.
    believed_tokens = (known_tokens - counted_discount) * 0.75
    # A lower count leaves something out, as what a cache held.
    if counted_discount <= 0 or carried_tokens < believed_tokens:
        return heuristic_tokens
    # JSON or base64 may have come in the place of what was counted.
    parts = list(_newest_parts(contents, memo, in_ascii=True))
    ascii_tokens = sum(part.size_bytes + part.other_bytes for part in parts) // 4
    dense_tokens = max(int(weighted_tokens(parts, ascii_tokens)) - ascii_tokens, 0)
    least_tokens = heuristic_tokens - discount_tokens + dense_tokens
    return min(heuristic_tokens, max(carried_tokens, least_tokens))


def request_script_discount(
    contents: Iterable[types.Content],
    config: types.GenerateContentConfig | None,
    memo: Memo,
) -> int:
    """Returns how far below bytes / 4 the tokens of a request may be by its scripts."""
    instruction = config.system_instruction if config is not None else None
    instruction = instruction if isinstance(instruction, str) else ""
    discount_tokens = script_discount_tokens(json_text(instruction))
    for content in contents:
        for part in content.parts or ():
            text = part.text if part is not None else None
            if not text or not text.isascii():
                discount_tokens += memo.measure_part(part).script_discount_tokens
    return int(discount_tokens)


def token_counter(correction: float | None) -> TokenCounter:
    """Counts tokens of texts: bytes / 4 by the correction, or density if larger."""

    def count(text: str) -> int:
        factor = max(correction or 0.0, estimate_text_density(text))
        return math.ceil(text_bytes(text) / 4 * factor)

    return count


def count_quoted_chars(request: str, window_tokens: int) -> int:
    """How many characters of the user's request to quote; -1 for all."""

    def count(text: str) -> int:
        # By its own density: the factor of a whole request would cut what fits.
        raw = text.encode("utf-8", "replace")
        least_tokens = len(raw) / 4 - script_discount_tokens(raw)
        return max(token_counter(None)(text), int(least_tokens))

    # 30 % of the window, and what an estimate may be too high.
    most_tokens = int(window_tokens * 0.33)
    if count(request) <= most_tokens:
        return -1
    return len(shorten_to_tokens(request, most_tokens, count))
