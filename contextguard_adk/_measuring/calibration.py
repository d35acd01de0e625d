"""Turns the measure of a request into an estimate of its prompt tokens.

- A heuristic token is four UTF-8 bytes of all that the model reads. The heuristic of a
  request is its number of heuristic tokens.
- A count is the number of real tokens that a provider has reported for a request.
- The correction of a model is the tokens of the model per heuristic token.
- The density of a text is its estimated tokens for each four bytes; see `density`.
- Some scripts have characters of two or three bytes that take few tokens. So bytes / 4
  is too high for a text in such a script. Bytes / 4 less the script discount is the
  fewest tokens that the text takes.
- A first estimate is an estimate for a model that has reported no count yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

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
from contextguard_adk._measuring.families import UNKNOWN, Family
from contextguard_adk._measuring.tokens import (
    Memo,
    config_texts,
    json_text,
    part_text,
    text_bytes,
)

DEFAULT_CORRECTION = 1.5
"""The correction of a model whose provider has counted nothing yet.

A first estimate applies this correction to media alone, because texts have a density.
If no estimate is at hand, as after a rejection, the correction applies to the whole
request."""

_MOST_VOCABULARY_RATIO = 1.35
"""The most tokens that another vocabulary is assumed to take for one of o200k_base."""

MAX_RATIO = 20.0
"""A higher correction is not believed."""

_MIN_CORRECTION = 1.0
_MAX_CORRECTION = 5.0

_LOW_COUNT_RATIO = 0.95
"""A count below this part of the heuristic may be due to the script of the text.
English prose has a count of 0.98 of the heuristic."""

_LARGE_GROWTH_RATIO = 0.05
"""Growth is large from this part of the counted request on.

Only large growth is multiplied by a factor for the model's vocabulary."""

_MAX_GROWTH_FACTOR = 2.0
"""The highest factor that corrects growth for the model's vocabulary.

Some vocabularies take a third more tokens than o200k_base."""

_FIRST_DISCOUNT_RATIO = 0.8
"""The part of the script discount that is added to bytes / 4 in a first estimate.

Vocabularies differ most in the scripts with a large discount: a vocabulary that does
not know such a script takes more than bytes / 4. The added part makes the estimate
about 1.5 times bytes / 4 in these scripts."""

_BELIEVED_RATIO = 0.75
"""A count below this part of the expected tokens is not believed.

The expected tokens are bytes / 4 less the script discount. A count may be somewhat
lower: in English, which has no discount, o200k_base takes 0.76 of bytes / 4 for the
Universal Declaration of Human Rights."""

_QUOTED_RATIO = 0.33
"""The part of the window that a quotation may take by its estimate.

This is 30 % of the window and a tenth of 30 %, because the estimate may be too high."""


def correction_factor(real_tokens: int, last_heuristic_tokens: int) -> float:
    """Returns the correction that follows from a call, limited to the range 1 to 5.

    Args:
        real_tokens: The count of the call.
        last_heuristic_tokens: The heuristic of the same call; above 0.
    """
    correction = real_tokens / last_heuristic_tokens
    raised_correction = max(_MIN_CORRECTION, correction)
    return min(_MAX_CORRECTION, raised_correction)


def first_margin(family: Family, threshold_ratio: float) -> float:
    """Returns the margin of a first estimate, which no count has shown to be right.

    The texts of a first estimate are multiplied by the factor of the family and by the
    margin. A request that is estimated below the threshold must fit into the window,
    even if the model takes `_MOST_VOCABULARY_RATIO` times the tokens of o200k_base.
    With a threshold at 0.9 of the window, factor and margin have to make
    1.35 * 0.9 / 0.97 = 1.25.

    Args:
        family: The family of the model.
        threshold_ratio: The threshold as a part of the window.
    """
    fitting_factor = _MOST_VOCABULARY_RATIO * threshold_ratio / OVERFULL_RATIO
    return max(family.least_margin, fitting_factor / family.factor)


class LastCount(NamedTuple):
    """The provider's count of the last request that it counted.

    Attributes:
        real_tokens: The count; None or 0 if the provider has counted nothing.
        heuristic_tokens: The heuristic of the request that was counted; None or 0 if
            unknown.
    """

    real_tokens: int | None = None
    heuristic_tokens: int | None = None


def estimate_prompt_tokens(
    request: MeasuredRequest,
    last: LastCount | None = None,
    *,
    correction: float | None = None,
    family: Family = UNKNOWN,
    margin: float = UNKNOWN.least_margin,
) -> int:
    """Estimates the prompt tokens of a request before it is sent.

    The estimate is made in one of three ways:

    - With a count and the heuristic of the counted request: see `estimate_by_count`.
    - Otherwise, with a correction: the heuristic times the correction or times the
      density of the texts, whichever is larger.
    - Otherwise, without a correction: the first estimate of `estimate_by_density`.

    If the heuristic of the counted request is unknown, the estimate is at least the
    count.

    Args:
        request: The request, and its heuristic.
        last: The provider's last count; None if the provider has counted nothing.
        correction: The correction of the model; None if unknown.
        family: The family of the model, for a first estimate.
        margin: The margin of a first estimate: see `first_margin`.
    """
    real_tokens = 0
    counted_heuristic_tokens = 0
    if last is not None:
        real_tokens = last.real_tokens or 0
        counted_heuristic_tokens = last.heuristic_tokens or 0
    if real_tokens and counted_heuristic_tokens:
        return request.estimate_by_count(real_tokens, counted_heuristic_tokens)

    if correction is None:
        estimated_tokens = request.estimate_by_density(family, margin)
    else:
        parts = request.newest_parts()
        dense_tokens = int(weighted_tokens(parts, request.heuristic_tokens))
        corrected_tokens = int(request.heuristic_tokens * correction)
        estimated_tokens = max(corrected_tokens, dense_tokens)

    # A count without the heuristic of the counted request is a lower bound only: the
    # growth since is unknown.
    return max(estimated_tokens, real_tokens)


@dataclass(frozen=True)
class MeasuredRequest:
    """A request whose prompt tokens are estimated.

    Attributes:
        contents: The messages of the request.
        heuristic_tokens: The heuristic of the request, its config included.
        config: The rest of the request, such as the instruction; None counts as no
            text.
        memo: Measures the contents, and remembers the measures.
    """

    contents: Sequence[types.Content]
    heuristic_tokens: int
    config: types.GenerateContentConfig | None = None
    memo: Memo = field(default_factory=Memo)

    def newest_parts(self) -> Iterator[SizedText]:
        """Yields the parts of the messages with their sizes, the last part first."""
        for content in reversed(self.contents):
            for part in reversed(content.parts or ()):
                measure = self.memo.measure_part(part)
                yield SizedText(
                    text_bytes=measure.text_bytes,
                    media_bytes=measure.media_bytes,
                    is_ascii=measure.is_ascii,
                    read=partial(part_text, part, self.memo.form),
                )

    def estimate_by_density(self, family: Family, margin: float) -> int:
        """Returns the first estimate of the request.

        The estimate is the larger of two sums:

        - the tokens of the texts by density, times the factor of the family, times
          `margin`, and the tokens of the media times `DEFAULT_CORRECTION`
        - the heuristic plus `_FIRST_DISCOUNT_RATIO` of the script discount

        Args:
            family: The family of the model.
            margin: The margin of a first estimate: see `first_margin`.
        """
        config_text = b"".join(config_texts(self.config))
        config_part = SizedText(
            text_bytes=len(config_text),
            media_bytes=0,
            is_ascii=config_text.isascii(),
            read=lambda: config_text,
        )
        parts = [*self.newest_parts(), config_part]

        # `weighted_tokens` leaves the tokens of media as they are, so these tokens can
        # be taken out of its result.
        all_tokens = weighted_tokens(
            parts, self.heuristic_tokens, has_single_digits=family.has_single_digits
        )
        media_tokens = sum(part.media_bytes for part in parts) / 4
        text_tokens = (all_tokens - media_tokens) * family.factor
        dense_tokens = int(text_tokens * margin + media_tokens * DEFAULT_CORRECTION)

        # Density is that of o200k_base. Other vocabularies may take more tokens for the
        # scripts that have a discount.
        discount_tokens = request_script_discount(self.contents, self.config, self.memo)
        added_tokens = int(_FIRST_DISCOUNT_RATIO * discount_tokens)
        least_tokens = self.heuristic_tokens + added_tokens
        return max(dense_tokens, least_tokens)

    def estimate_by_count(self, real_tokens: int, counted_heuristic_tokens: int) -> int:
        """Estimates this request by the count of an earlier request.

        The estimate is the larger of two numbers:

        - The scaled heuristic: the heuristic of this request times the correction of
          the earlier request, or the result of `_scale_down` after a low count.
        - The count plus the growth. The growth is the heuristic of this request less
          the heuristic of the earlier request. It is multiplied by the density of the
          newest texts and, if it is large, by a factor for the model's vocabulary. If
          the request has shrunk, this number is left out.

        Args:
            real_tokens: The provider's count of the earlier request; above 0.
            counted_heuristic_tokens: The heuristic of the earlier request; above 0.
        """
        is_low_count = real_tokens < counted_heuristic_tokens * _LOW_COUNT_RATIO
        if is_low_count:
            scaled_tokens = self._scale_down(real_tokens, counted_heuristic_tokens)
        else:
            correction = correction_factor(real_tokens, counted_heuristic_tokens)
            scaled_tokens = int(self.heuristic_tokens * correction)

        # If the request has shrunk, the count includes contents that are gone.
        growth_tokens = self.heuristic_tokens - counted_heuristic_tokens
        if growth_tokens < 0:
            return scaled_tokens

        # The iterator yields the newest parts first. This call takes as many parts as
        # the growth has tokens. The call below takes the parts before them, which are
        # those of the earlier request.
        parts = self.newest_parts()
        weighed_growth_tokens = weighted_tokens(parts, growth_tokens)

        is_large_growth = (
            growth_tokens >= counted_heuristic_tokens * _LARGE_GROWTH_RATIO
        )
        if is_large_growth:
            # Density is that of o200k_base. The counted texts show by which factor the
            # model takes more tokens. For small growth the factor would change little,
            # so these texts are not read.
            dense_counted_tokens = weighted_tokens(parts, counted_heuristic_tokens)
            vocabulary_ratio = real_tokens / dense_counted_tokens
            vocabulary_factor = min(_MAX_GROWTH_FACTOR, max(1.0, vocabulary_ratio))
            weighed_growth_tokens *= vocabulary_factor

        # The growth takes at least its heuristic, even if the density is below 1.
        added_tokens = max(int(weighed_growth_tokens), growth_tokens)
        return max(scaled_tokens, real_tokens + added_tokens)

    def _scale_down(self, real_tokens: int, counted_heuristic_tokens: int) -> int:
        """Scales the heuristic down, if a low count of an earlier request allows it.

        A count below the heuristic has one of two causes:

        - The scripts of the texts take fewer tokens than bytes / 4. Then this request
          takes fewer tokens too, and the result may be below the heuristic.
        - The count leaves something out, such as the contents of a cache. Then the
          count tells nothing about this request, and the result is the heuristic.

        Args:
            real_tokens: The provider's count of the earlier request.
            counted_heuristic_tokens: The heuristic of the earlier request.
        """
        # The older part of this request was in the earlier request. A request that has
        # shrunk has only an older part, which takes the count in proportion.
        older_tokens = min(self.heuristic_tokens, counted_heuristic_tokens)
        older_real_tokens = int(real_tokens * older_tokens / counted_heuristic_tokens)

        # The discount is split between the older part and the newest contents. The
        # config belongs to the older part.
        discount_tokens = request_script_discount(self.contents, self.config, self.memo)
        newest_contents = self._newest_contents(self.heuristic_tokens - older_tokens)
        newest_discount = request_script_discount(newest_contents, None, self.memo)
        older_discount = discount_tokens - newest_discount

        # The scripts are the cause if they have a discount, and if the count is not
        # much lower than the discount explains.
        expected_tokens = older_tokens - older_discount
        fewest_tokens = expected_tokens * _BELIEVED_RATIO
        is_due_to_scripts = older_discount > 0 and older_real_tokens >= fewest_tokens
        if not is_due_to_scripts:
            return self.heuristic_tokens

        # The count does not include the newest contents. So a lower bound is computed
        # for the whole request, without the count: the discount is taken from the
        # heuristic, and the surplus of texts in ASCII is added. The heuristic itself is
        # the upper bound.
        surplus_tokens = self._count_ascii_surplus()
        least_tokens = self.heuristic_tokens - discount_tokens + surplus_tokens
        scaled_tokens = max(least_tokens, older_real_tokens)
        return min(scaled_tokens, self.heuristic_tokens)

    def _count_ascii_surplus(self) -> int:
        """Returns by how many tokens bytes / 4 is too low for all parts in ASCII.

        Bytes / 4 is too low for JSON and base64. The result is 0 if bytes / 4 is high
        enough for the parts together.
        """
        ascii_parts = [part for part in self.newest_parts() if part.is_ascii]
        ascii_bytes = sum(part.text_bytes + part.media_bytes for part in ascii_parts)
        ascii_tokens = ascii_bytes // 4
        dense_ascii_tokens = int(weighted_tokens(ascii_parts, ascii_tokens))
        return max(0, dense_ascii_tokens - ascii_tokens)

    def _newest_contents(self, heuristic_tokens: int) -> Sequence[types.Content]:
        """Returns the fewest last contents with at least so many heuristic tokens.

        Returns all contents if they have fewer tokens; none for 0 tokens.
        """
        start = len(self.contents)
        missing_tokens = heuristic_tokens
        while start > 0 and missing_tokens > 0:
            start -= 1
            missing_tokens -= self.memo.estimate_tokens([self.contents[start]])
        return self.contents[start:]


def request_script_discount(
    contents: Iterable[types.Content],
    config: types.GenerateContentConfig | None,
    memo: Memo,
) -> int:
    """Returns the script discount of a request.

    The instruction is read if it is a single text. The rest of the config is not read.

    Args:
        contents: The contents of the request.
        config: The config of the request; None counts as no text.
        memo: Measures the contents.
    """
    discount_tokens = 0.0
    instruction = config.system_instruction if config is not None else None
    if isinstance(instruction, str):
        discount_tokens += script_discount_tokens(json_text(instruction))

    for content in contents:
        for part in content.parts or ():
            text = part.text if part is not None else None
            # A text in ASCII has no discount, so the text need not be measured.
            if text and text.isascii():
                continue
            discount_tokens += memo.measure_part(part).script_discount_tokens
    return int(discount_tokens)


def token_counter(correction: float | None) -> TokenCounter:
    """Returns a function that estimates the tokens of a text.

    The function multiplies bytes / 4 by the correction or by the density of the text,
    whichever is larger.

    Args:
        correction: The correction of the model; None if unknown.
    """
    least_factor = correction or 0.0

    def count(text: str) -> int:
        factor = max(least_factor, estimate_text_density(text))
        return math.ceil(text_bytes(text) / 4 * factor)

    return count


def count_quoted_chars(request: str, window_tokens: int) -> int:
    """Returns how many characters of the user's request to quote; -1 for all.

    A quotation takes at most `_QUOTED_RATIO` of the window. A longer request is
    shortened, and the characters of the notice are part of the result.

    Args:
        request: The text of the user.
        window_tokens: The context window.
    """
    # The correction of the model is left out, because the correction of a whole prompt
    # may be much too high for the request alone.
    count_by_density = token_counter(None)

    def count(text: str) -> int:
        # Density may be too low. So a text counts at least as bytes / 4 less its script
        # discount.
        raw = text.encode("utf-8", "replace")
        fewest_tokens = len(raw) / 4 - script_discount_tokens(raw)
        return max(count_by_density(text), int(fewest_tokens))

    most_tokens = int(window_tokens * _QUOTED_RATIO)
    if count(request) <= most_tokens:
        return -1
    return len(shorten_to_tokens(request, most_tokens, count))
