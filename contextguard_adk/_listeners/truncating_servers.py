"""Recognizes servers that cut a prompt silently, as Ollama does, by what they count."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from contextguard_adk._runtime.memory import EqualCounts, Limit
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.facts import Count
from contextguard_adk._turn.units import Answered, Listener

logger = logging.getLogger("contextguard_adk.limits")

_MIN_CUT_TOKENS = 2_040  # Ollama's smallest default is 2,048; some keep a few free.
_LEAST_RATIO = 0.4  # Of bytes / 4: what counts less has left something out.
_GROWN_RATIO = 0.05  # Of the figure, while it stays the same.


class TruncatingServers(Listener):
    """Finds the window of a server whose counts stop at one figure.

    Three equal counts running show it, where the text that was sent grew by a twentieth
    of the figure, and beyond it by the ratio of earlier counts. Counts that differ show
    nothing, nor do those of a model whose prompts a cache serves: they may leave that
    out. Where equal counts were passed before, they are rounded. The process keeps to
    the figure until a count exceeds it.
    """

    def answered(self, event: Answered) -> None:
        """Looks at a count."""
        call = event.call
        count = event.count
        limits = event.guard.limits
        if count is None or call.is_observed:
            return
        model = call.model
        real_tokens = count.real_tokens
        seen = call.memory.facts.of(model)
        known = limits.get(call.client, seen.kept)
        is_passed = known is not None and real_tokens > known.tokens
        if known is not None and is_passed and count.is_size and not known.is_rate:
            limits.pop(call.client, None)
            seen = replace(seen, kept=None)
        was_cached = seen.was_cached or event.usage.cached_tokens > 0
        equal = _follow(seen.equal_counts, count)
        seen = replace(seen, was_cached=was_cached, equal_counts=equal)
        call.memory.see(model, seen)
        if was_cached or not _is_cut(equal) or real_tokens >= call.window_tokens:
            return
        limits[call.client] = limit = Limit(real_tokens)
        call.memory.see(model, replace(seen, accepted_tokens=real_tokens, kept=limit))
        message = (
            "Model %r: the provider counts %s prompt tokens, call after call, while "
            "more is sent: it cuts prompts without a word. Its window is taken to be "
            "that, not %s. Set context_window=%d on the agent's strategy, or give the "
            "server a larger window (Ollama: `num_ctx`)."
        )
        figures = f"{real_tokens:,}", f"{call.window_tokens:,}", real_tokens
        warn_once(logger, message, model, *figures)


def _follow(equal: EqualCounts, count: Count) -> EqualCounts:
    """Returns the equal counts after another one."""
    real_tokens = count.real_tokens
    text_tokens = max(1, count.text_tokens)
    grown_tokens = text_tokens - equal.last_tokens
    if real_tokens != equal.real_tokens or grown_tokens < 0:
        return _begin(equal, real_tokens, text_tokens)

    # What has come may be all that is counted, beside a cache that is not reported.
    is_all = abs(grown_tokens - real_tokens) <= real_tokens / 4
    if grown_tokens == 0 or is_all:
        return replace(equal, last_tokens=text_tokens)
    return replace(equal, last_tokens=text_tokens, times=equal.times + 1)


def _begin(before: EqualCounts, real_tokens: int, text_tokens: int) -> EqualCounts:
    """Returns the first of perhaps equal counts; keeps what those before have shown."""
    ratio = before.usual_ratio
    counted_ratio = before.real_tokens / max(1, before.last_tokens)
    if before.times and counted_ratio >= _LEAST_RATIO:
        ratio = min(ratio, counted_ratio)
    was_passed = before.times > 1 and real_tokens > before.real_tokens
    return EqualCounts(
        real_tokens=real_tokens,
        first_tokens=text_tokens,
        last_tokens=text_tokens,
        times=1,
        usual_ratio=ratio,
        has_steps=before.has_steps or (was_passed and _has_grown(before)),
    )


def _has_grown(equal: EqualCounts) -> bool:
    grown_tokens = equal.last_tokens - equal.first_tokens
    return grown_tokens >= _GROWN_RATIO * equal.real_tokens


def _is_cut(equal: EqualCounts) -> bool:
    """Whether these counts can only be those of prompts that were cut."""
    # Before the first other count, as many tokens as bytes / 4.
    ratio = 1.0 if equal.usual_ratio == math.inf else equal.usual_ratio
    least_tokens = (1 + _GROWN_RATIO) * equal.real_tokens
    is_beyond = equal.last_tokens * ratio >= least_tokens
    is_large = equal.real_tokens >= _MIN_CUT_TOKENS
    has_plateau = equal.times >= 3 and _has_grown(equal) and not equal.has_steps
    return has_plateau and is_beyond and is_large
