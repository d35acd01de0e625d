"""Recognizes servers that cut a prompt silently, as Ollama does, by what they count."""

from __future__ import annotations

import logging
from dataclasses import replace

from contextguard_adk._providers.clients import read_usage
from contextguard_adk._runtime.runs import Limit
from contextguard_adk._runtime.sessions import EqualCounts
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.units import Answered, Listener
from contextguard_adk._turn.values import Count

logger = logging.getLogger("contextguard_adk.limits")

_MIN_CUT_TOKENS = 2_048  # The smallest default that Ollama has had.


class TruncatingServers(Listener):
    """Finds the window of a server whose counts stop at one figure.

    Three equal counts running show it, where the text that was sent grew by a twentieth
    of the figure. Counts that differ show nothing, nor do those of a model whose
    prompts a cache serves: they may leave that out. The process keeps to the figure
    until a count exceeds it.
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
        known = limits.get(model)
        if count.is_size and known and real_tokens > known.tokens:
            limits.pop(model, None)
        seen = call.session.facts.of(model)
        usage = read_usage(event.response.usage_metadata)
        was_cached = seen.was_cached or usage.cached_tokens > 0
        equal = _follow(seen.equal_counts, count)
        call.session.see(model, was_cached=was_cached, equal_counts=equal)
        if was_cached or not _is_cut(equal) or real_tokens >= call.window_tokens:
            return
        limits[model] = Limit(real_tokens)
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
    real_tokens, text_tokens = count.real_tokens, count.text_tokens
    grown_tokens = text_tokens - equal.last_tokens
    if real_tokens != equal.real_tokens or grown_tokens < 0:
        return EqualCounts(real_tokens, text_tokens, text_tokens, 1)
    # What has come may be all that is counted, beside a cache that is not reported.
    is_all = abs(grown_tokens - real_tokens) <= real_tokens / 4
    if grown_tokens == 0 or is_all:
        return replace(equal, last_tokens=text_tokens)
    return replace(equal, last_tokens=text_tokens, times=equal.times + 1)


def _is_cut(equal: EqualCounts) -> bool:
    """Whether these counts can only be those of prompts that were cut."""
    grown_tokens = equal.last_tokens - equal.first_tokens
    has_grown = grown_tokens >= 0.05 * equal.real_tokens
    # Of far less than is counted nothing was cut; no text takes twice bytes / 4.
    is_sent = 2 * equal.last_tokens >= equal.real_tokens >= _MIN_CUT_TOKENS
    return equal.times >= 3 and has_grown and is_sent
