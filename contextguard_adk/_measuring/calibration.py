"""Turns the measure of a request into an estimate of its prompt tokens.

The measure is called the heuristic: UTF-8 bytes / 4 of all that the model reads.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from google.genai import types

from contextguard_adk._measuring.budgets import (
    OVERFULL_RATIO,
    TokenCounter,
    shorten_to_tokens,
)
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
    part_text,
    text_bytes,
)

DEFAULT_CORRECTION = 1.5
"""Real tokens per heuristic token of images and other media, while the provider has
counted nothing; of a whole request, when it was rejected without a count."""

FIRST_MARGIN = 1.15
_CLAUDE_MARGIN = 1.5
"""The factors of a first estimate, which is the density of the text. Claude's
vocabularies take up to 1.2 times the tokens of o200k_base, since Opus 4.7 up to 1.35
times that (Anthropic's release notes)."""

_MOST_VOCABULARY_RATIO = 1.35
"""The most tokens that another vocabulary is assumed to take for one of o200k_base."""

MAX_RATIO = 20.0
"""More real tokens per heuristic token are not believed."""

_MIN_CORRECTION = 1.0
_MAX_CORRECTION = 5.0

_LOW_COUNT_RATIO = 0.95
"""A count below this part of the heuristic may be due to the script of the text.
English prose counts 0.98 of it."""

_LARGE_GROWTH_RATIO = 0.05
"""Growth by this part of the last request or more is weighed by the vocabulary."""

_MAX_GROWTH_FACTOR = 2.0
"""The most that growth is multiplied by for a vocabulary; some take a third more."""

_FIRST_DISCOUNT_RATIO = 0.8
"""The part of the script's discount that is added to bytes / 4 in a first estimate.

Vocabularies differ most in the scripts that take few tokens at best. With this the
estimate is about 1.5 times bytes / 4 in these scripts."""

_BELIEVED_RATIO = 0.75
"""The part of the fewest tokens, by the scripts of a text, below which no count is
believed. English, whose fewest are bytes / 4, takes 0.76 of them by o200k_base in the
Universal Declaration of Human Rights."""

_QUOTED_RATIO = 0.33
"""The part of the window that a quotation may take by its estimate: 30 %, and a tenth
more because the estimate may be too high."""


def correction_factor(real_tokens: int, last_heuristic_tokens: int) -> float:
    """Returns the real tokens per heuristic token of the last call, from 1 to 5."""
    ratio = real_tokens / last_heuristic_tokens
    return min(max(ratio, _MIN_CORRECTION), _MAX_CORRECTION)


def first_margin(model: str, threshold_ratio: float) -> float:
    """Returns the factor of a first estimate.

    A request that is estimated below the threshold fits into the window also for a
    vocabulary that takes more tokens.

    Args:
        model: The name of the model.
        threshold_ratio: The threshold as a part of the window.
    """
    least_margin = _CLAUDE_MARGIN if "claude" in model.lower() else FIRST_MARGIN
    return max(least_margin, _MOST_VOCABULARY_RATIO * threshold_ratio / OVERFULL_RATIO)


@dataclass(frozen=True)
class MeasuredRequest:
    """A request to be estimated.

    Attributes:
        heuristic_tokens: Its bytes / 4.
        contents: Its messages.
        config: The rest of it; None counts as no text.
        memo: Measures the contents.
    """

    heuristic_tokens: int
    contents: Sequence[types.Content]
    config: types.GenerateContentConfig | None = None
    memo: Memo = field(default_factory=Memo)

    def newest_parts(self, *, in_ascii: bool = False) -> Iterator[SizedText]:
        """Yields the parts, the last one first; `in_ascii` leaves out other texts."""
        for content in reversed(self.contents):
            for part in reversed(content.parts or ()):
                text = part.text if part is not None else None
                if in_ascii and text and not text.isascii():
                    continue

                measure = self.memo.measure_part(part)
                if measure.is_ascii or not in_ascii:
                    read = partial(part_text, part, self.memo.form)
                    yield SizedText(measure.text_bytes, measure.media_bytes, read)

    def estimate_by_density(self, margin: float) -> int:
        """Estimates a request of whose model nothing is known."""
        config_text = b"".join(config_texts(self.config))
        config_part = SizedText(len(config_text), 0, lambda: config_text)
        parts = [*self.newest_parts(), config_part]

        media_tokens = sum(part.other_bytes for part in parts) / 4
        text_tokens = weighted_tokens(parts, self.heuristic_tokens) - media_tokens
        tokens = text_tokens * margin + media_tokens * DEFAULT_CORRECTION

        discount_tokens = request_script_discount(self.contents, self.config, self.memo)
        added_tokens = int(_FIRST_DISCOUNT_RATIO * discount_tokens)
        return max(int(tokens), self.heuristic_tokens + added_tokens)

    def estimate_by_count(self, real_tokens: int, last_heuristic_tokens: int) -> int:
        """Estimates a request by the count of one that was sent before.

        Args:
            real_tokens: What the provider counted.
            last_heuristic_tokens: Bytes / 4 of the request that it counted.
        """
        growth_tokens = self.heuristic_tokens - last_heuristic_tokens
        if real_tokens < last_heuristic_tokens * _LOW_COUNT_RATIO:
            scaled_tokens = self._scale_down(real_tokens, last_heuristic_tokens)
        else:
            correction = correction_factor(real_tokens, last_heuristic_tokens)
            scaled_tokens = int(self.heuristic_tokens * correction)
        if growth_tokens < 0:
            return scaled_tokens

        # One iterator: the parts before those that grew are read on from there.
        parts = self.newest_parts()
        grown_tokens = weighted_tokens(parts, growth_tokens)
        if growth_tokens >= last_heuristic_tokens * _LARGE_GROWTH_RATIO:
            # They show how many tokens of this provider stand for one of o200k_base.
            dense_tokens = weighted_tokens(parts, last_heuristic_tokens)
            vocabulary_ratio = real_tokens / dense_tokens
            grown_tokens *= min(max(vocabulary_ratio, 1.0), _MAX_GROWTH_FACTOR)
        return max(scaled_tokens, real_tokens + max(int(grown_tokens), growth_tokens))

    def _scale_down(self, real_tokens: int, last_heuristic_tokens: int) -> int:
        """Returns the heuristic, lowered if scripts explain that the count was lower.

        Args:
            real_tokens: What the provider counted.
            last_heuristic_tokens: Bytes / 4 of the request that it counted.
        """
        known_tokens = min(self.heuristic_tokens, last_heuristic_tokens)
        carried_tokens = int(real_tokens * known_tokens / last_heuristic_tokens)

        all_discount = request_script_discount(self.contents, self.config, self.memo)
        # Contents that the provider has not counted explain nothing.
        uncounted = self._newest_contents(self.heuristic_tokens - known_tokens)
        uncounted_discount = request_script_discount(uncounted, None, self.memo)
        counted_discount = all_discount - uncounted_discount

        # A lower count leaves something out, such as the contents of a cache.
        believed_tokens = (known_tokens - counted_discount) * _BELIEVED_RATIO
        if counted_discount <= 0 or carried_tokens < believed_tokens:
            return self.heuristic_tokens

        # JSON or base64 may have replaced contents that were counted.
        ascii_parts = list(self.newest_parts(in_ascii=True))
        ascii_bytes = sum(part.size_bytes + part.other_bytes for part in ascii_parts)
        ascii_tokens = ascii_bytes // 4
        dense_ascii_tokens = int(weighted_tokens(ascii_parts, ascii_tokens))
        more_tokens = max(dense_ascii_tokens - ascii_tokens, 0)

        least_tokens = self.heuristic_tokens - all_discount + more_tokens
        return min(self.heuristic_tokens, max(carried_tokens, least_tokens))

    def _newest_contents(self, heuristic_tokens: int) -> Sequence[types.Content]:
        """Returns the last contents, as many as hold so many tokens."""
        start = len(self.contents)
        missing_tokens = heuristic_tokens
        while start and missing_tokens > 0:
            start -= 1
            missing_tokens -= self.memo.estimate_tokens((self.contents[start],))
        return self.contents[start:]


def estimate_prompt_tokens(
    request: MeasuredRequest,
    real_tokens: int | None = None,
    last_heuristic_tokens: int | None = None,
    *,
    default: float | None = None,
    margin: float = FIRST_MARGIN,
) -> int:
    """Estimates the prompt tokens of a request before it is sent.

    Without a count and without a `default` the density of all text decides. With a
    `default` and no count it is the larger of the heuristic times `default`, and
    of the heuristic weighed by density. With a count it is the larger of the documented
    rule, `max(real, heuristic x correction)`, and of the last count plus the growth
    since, weighed by its density. The real count is no floor for a request that has
    shrunk, since it counts contents that are gone. A count below bytes / 4 only stands
    if the scripts of the text explain it.

    Args:
        request: The request.
        real_tokens: What the provider counted last; None or 0 if it has not.
        last_heuristic_tokens: Bytes / 4 of the request that it counted.
        default: The correction of the model, if one is known without a count.
        margin: The factor of a first estimate.
    """
    if real_tokens and last_heuristic_tokens:
        return request.estimate_by_count(real_tokens, last_heuristic_tokens)

    if default is None:
        estimated_tokens = request.estimate_by_density(margin)
    else:
        parts = request.newest_parts()
        dense_tokens = int(weighted_tokens(parts, request.heuristic_tokens))
        scaled_tokens = int(request.heuristic_tokens * default)
        estimated_tokens = max(scaled_tokens, dense_tokens)
    return max(estimated_tokens, real_tokens or 0)


def request_script_discount(
    contents: Iterable[types.Content],
    config: types.GenerateContentConfig | None,
    memo: Memo,
) -> int:
    """Returns by how many tokens bytes / 4 may be too high for a request's scripts."""
    discount_tokens = 0.0
    instruction = config.system_instruction if config is not None else None
    if isinstance(instruction, str):
        discount_tokens += script_discount_tokens(json_text(instruction))

    for content in contents:
        for part in content.parts or ():
            text = part.text if part is not None else None
            if not text or not text.isascii():
                discount_tokens += memo.measure_part(part).script_discount_tokens
    return int(discount_tokens)


def token_counter(correction: float | None) -> TokenCounter:
    """Returns a function that estimates the tokens of a text.

    It multiplies bytes / 4 by the correction, or by the density of the text if that is
    larger or no correction is known.
    """

    def count(text: str) -> int:
        factor = max(correction or 0.0, estimate_text_density(text))
        return math.ceil(text_bytes(text) / 4 * factor)

    return count


def count_quoted_chars(request: str, window_tokens: int) -> int:
    """Returns how many characters of the user's request to quote; -1 for all."""
    # By the request's own density: the correction of a whole prompt may be higher.
    count_by_density = token_counter(None)

    def count(text: str) -> int:
        raw = text.encode("utf-8", "replace")
        least_tokens = len(raw) / 4 - script_discount_tokens(raw)
        return max(count_by_density(text), int(least_tokens))

    most_tokens = int(window_tokens * _QUOTED_RATIO)
    if count(request) <= most_tokens:
        return -1
    return len(shorten_to_tokens(request, most_tokens, count))
