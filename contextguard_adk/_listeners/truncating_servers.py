"""Recognizes servers that cut a prompt silently, as Ollama does, by their counts.

A count is the number of prompt tokens that a provider reports. A server that cuts
prompts reports the same count call after call, while the guard sends more text. A
series is several calls of one model in a row with the same count. The first request of
a series is telling. A later request is telling if its count should have been higher,
because its text is longer.

The text of a request, without images and files, is measured in heuristic tokens, which
are four bytes each. The ratio of a count is the count per heuristic token of the text.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from contextguard_adk._runtime.memory import with_newest
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.facts import Count
from contextguard_adk._turn.units import Answered, Listener

logger = logging.getLogger("contextguard_adk.limits")

_MIN_CUT_TOKENS = 2_040
"""A count below this is not taken for a window.

Ollama's smallest default window has 2,048 tokens, and some servers keep a few tokens of
their window free.
"""

_LEAST_RATIO = 0.4
"""A count with a lower ratio is not used: such a count leaves out some of the text."""

_GROWN_RATIO = 0.05
"""A series shows that prompts are cut only if two sizes are at least this part of the
count:

- the heuristic tokens by which the text has grown during the series
- the tokens by which the count is lower than expected for the last text
"""

_LEAST_TELLING_COUNT = 3
"""A series of fewer telling requests does not show that prompts are cut."""


@dataclass(frozen=True)
class EqualCounts:
    """A series of equal counts of one model, and what earlier counts have shown.

    Attributes:
        real_tokens: The count that the provider reported each time.
        first_tokens: The heuristic tokens of the first text in the series.
        last_tokens: The heuristic tokens of the last text in the series.
        telling_count: The number of telling requests in the series, see `_add_count`;
            0 if the model has had no count yet.
        lowest_ratio: The lowest ratio of a count before this series; infinite if there
            was none.
        are_counts_rounded: Whether a higher count has followed an earlier series with a
            growing text. Then the server rounds its counts, and does not cut prompts.
        was_cached: Whether a cache has served a part of any prompt.
    """

    real_tokens: int = 0
    first_tokens: int = 0
    last_tokens: int = 0
    telling_count: int = 0
    lowest_ratio: float = math.inf
    are_counts_rounded: bool = False
    was_cached: bool = False

    @property
    def has_text_grown(self) -> bool:
        """Whether the text grew by a twentieth of the count during the series."""
        grown_tokens = self.last_tokens - self.first_tokens
        return grown_tokens >= _GROWN_RATIO * self.real_tokens


@dataclass(frozen=True)
class CountsOfModels:
    """The newest series of equal counts of each model, by the model's name."""

    by_model: Mapping[str, EqualCounts] = field(default_factory=dict)


class TruncatingServers(Listener):
    """Finds the window of a server whose counts stop at one figure.

    Three equal counts of growing texts show such a window under two conditions:

    - From the first of these texts to the last, the text has grown by a twentieth of
      the count.
    - By the lowest ratio of earlier counts, the last text should have a count that is
      higher by a twentieth.

    The counts show nothing in two cases:

    - If a cache has served a part of a prompt: the count may leave out that part.
    - If a higher count has followed equal counts of a growing text before: the server
      rounds its counts.

    The process keeps to the window until a count exceeds the window
    (`forget_exceeded` in `_core/limits.py`).
    """

    def answered(self, event: Answered) -> None:
        """Remembers the count; limits the model's prompts once they are cut."""
        call = event.call
        count = event.count
        if count is None or call.is_observed:
            return  # A guard that only observes limits nothing.

        by_model = call.memory.facts.unit(CountsOfModels).by_model
        series_before = by_model.get(call.model, EqualCounts())
        series = _add_count(series_before, count)
        if event.usage.cached_tokens > 0:
            series = replace(series, was_cached=True)
        call.memory.remember_unit(
            CountsOfModels(with_newest(by_model, call.model, series))
        )

        if _shows_cut_prompts(series) and count.real_tokens < call.window_tokens:
            _limit_prompts(event, count.real_tokens)


def _limit_prompts(event: Answered, window_tokens: int) -> None:
    """Keeps the model's prompts within a window from now on, and warns once.

    The window holds in the whole process for this server (`Guard.limits`), and in this
    session for this model (`Seen.limits`).
    """
    call = event.call
    seen = call.memory.facts.of(call.model)
    known_limits = event.guard.limits.get(call.server_key, seen.limits)
    limits = known_limits.with_window(window_tokens)
    event.guard.limits[call.server_key] = limits
    call.memory.remember_seen(
        call.model, replace(seen, accepted_tokens=window_tokens, limits=limits)
    )

    message = (
        "Model %r: the provider counts %s prompt tokens, call after call, while "
        "more is sent: it cuts prompts without a word. Its window is taken to be "
        "that, not %s. Set context_window=%d on the agent's strategy, or give the "
        "server a larger window (Ollama: `num_ctx`)."
    )
    counted = f"{window_tokens:,}"
    assumed = f"{call.window_tokens:,}"
    warn_once(logger, message, call.model, counted, assumed, window_tokens)


def _add_count(series: EqualCounts, count: Count) -> EqualCounts:
    """Returns the series of equal counts after another count.

    There are four cases:

    - If the count is another one, or the text has become shorter: a new series begins.
    - If the text has the same length: an equal count shows nothing, so `telling_count`
      stays.
    - If the count is about the number of tokens by which the text has grown: a cache
      may have served the older text without a report, so that only the new text was
      counted. Then an equal count shows nothing, so `telling_count` stays.
    - Otherwise: the text has grown, and the count should have risen. `telling_count`
      rises by one.
    """
    real_tokens = count.real_tokens
    text_tokens = max(1, count.text_tokens)  # Ratios divide by these tokens.
    grown_tokens = text_tokens - series.last_tokens
    if real_tokens != series.real_tokens or grown_tokens < 0:
        return _begin_series(series, real_tokens, text_tokens)

    # A quarter allows for the difference between a count and heuristic tokens.
    may_be_of_new_text = abs(grown_tokens - real_tokens) <= real_tokens / 4
    if grown_tokens == 0 or may_be_of_new_text:
        return replace(series, last_tokens=text_tokens)
    return replace(
        series, last_tokens=text_tokens, telling_count=series.telling_count + 1
    )


def _begin_series(
    before: EqualCounts, real_tokens: int, text_tokens: int
) -> EqualCounts:
    """Returns a new series of one count, with the facts that earlier counts have shown.

    Args:
        before: The series that has ended; its `telling_count` is 0 if there was none.
        real_tokens: The count.
        text_tokens: The heuristic tokens of the text that was counted, at least 1.
    """
    was_counted = before.telling_count > 0
    lowest_ratio = before.lowest_ratio
    ratio_before = before.real_tokens / max(1, before.last_tokens)
    if was_counted and ratio_before >= _LEAST_RATIO:
        lowest_ratio = min(lowest_ratio, ratio_before)

    # A server that cuts prompts repeats the highest of its counts. So if the count has
    # been repeated for a growing text, and now rises, the server rounds its counts.
    was_repeated = before.telling_count > 1 and before.has_text_grown
    is_rounded = was_repeated and real_tokens > before.real_tokens
    return EqualCounts(
        real_tokens=real_tokens,
        first_tokens=text_tokens,
        last_tokens=text_tokens,
        telling_count=1,
        lowest_ratio=lowest_ratio,
        are_counts_rounded=before.are_counts_rounded or is_rounded,
        was_cached=before.was_cached,
    )


def _shows_cut_prompts(series: EqualCounts) -> bool:
    """Returns whether a series shows that prompts are cut: see `TruncatingServers`."""
    may_have_other_reason = series.was_cached or series.are_counts_rounded
    if may_have_other_reason:
        return False
    if series.telling_count < _LEAST_TELLING_COUNT or not series.has_text_grown:
        return False

    # The last text should have at least `expected_tokens` as its count, by the lowest
    # ratio of the counts before this series. If there was no such count, the ratio is
    # taken to be 1: a token of four bytes.
    has_ratio = series.lowest_ratio != math.inf
    ratio = series.lowest_ratio if has_ratio else 1.0
    expected_tokens = series.last_tokens * ratio
    is_count_too_low = expected_tokens >= (1 + _GROWN_RATIO) * series.real_tokens
    return is_count_too_low and series.real_tokens >= _MIN_CUT_TOKENS
