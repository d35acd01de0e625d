"""Recognizes servers that cut a prompt silently, as Ollama does, by what they count."""

from __future__ import annotations

import logging

from contextguard_adk._runtime.sessions import Ceiling
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.units import Answered, Listener
from contextguard_adk._turn.values import Count

logger = logging.getLogger("contextguard_adk.limits")

_MIN_TRUNCATED_TOKENS = 2_048  # The smallest default that Ollama has had.
_SAME_COUNT, _SAME_TOKENS = 3, 4  # So many counts running that differ by no more.
# Where whole messages are cut, counts differ. They show a ceiling where none is higher
# while so many times as much text comes, and none lacks more than a message.
_GROWN_RATIO, _HIGHER_RATIO, _LEAST_RATIO = 3, 1.005, 0.75


class TruncatingServers(Listener):
    """Guesses the window of a server whose counts stop at one figure.

    Only an assumed window is narrowed. Counts of a server that edits the history go on
    rising, though slowly; where a cache has served something, they may leave that out.
    """

    def answered(self, event: Answered) -> None:
        call, count = event.call, event.count
        if count is None or call.is_observed:
            return
        session, model = call.session, call.model
        seen, learned = session.facts.of(model), event.state.shown(model)
        ceiling = _follow(seen.ceiling, count)
        session.see(model, ceiling=ceiling, guess_count=seen.guess_count + 1)
        if known_tokens := learned.window_tokens:
            is_passed = count.is_size and count.real_tokens > known_tokens
            if is_passed:
                event.state.learn(model, window_tokens=None, is_guess=False)
            if is_passed or (seen.is_probing and count.text_tokens > known_tokens):
                session.see(model, guess_count=0)
            return
        is_known = seen.was_cached or not call.is_assumed
        if is_known or not (count.is_behind and _is_reached(ceiling, count)):
            return
        shown_tokens, known_tokens = ceiling.highest_tokens, call.stated_window_tokens
        # Of messages that were cut, the last may have taken a quarter.
        if _MIN_TRUNCATED_TOKENS * _LEAST_RATIO <= shown_tokens < known_tokens:
            shown_tokens = max(shown_tokens, _MIN_TRUNCATED_TOKENS)
            event.state.learn(model, window_tokens=shown_tokens, is_guess=True)
            session.see(model, guess_count=0)
            message = (
                "The prompt tokens that the provider counts for agent %r stop at one "
                "figure while more is sent: it seems to truncate silently. Its window "
                f"is taken to be {shown_tokens} tokens in place of {known_tokens}; set "
                "`context_window`."
            )
            warn_once(logger, message, event.state.agent)


def _follow(ceiling: Ceiling, count: Count) -> Ceiling:
    """Returns the ceiling after another count."""
    real_tokens, text_tokens = count.real_tokens, count.text_tokens
    highest = ceiling.highest_tokens, ceiling.text_tokens
    is_higher = real_tokens > ceiling.highest_tokens * _HIGHER_RATIO
    is_lower = real_tokens < ceiling.highest_tokens * _LEAST_RATIO
    if is_higher or (is_lower and text_tokens >= ceiling.text_tokens):
        highest = real_tokens, text_tokens
    is_same = abs(real_tokens - ceiling.last_tokens) <= _SAME_TOKENS
    same_count = ceiling.same_count + 1 if is_same and count.is_behind else 1
    followed_tokens = ceiling.followed_tokens
    if real_tokens >= text_tokens * _LEAST_RATIO:
        followed_tokens = max(followed_tokens, real_tokens)
    return Ceiling(*highest, followed_tokens, real_tokens, same_count)


def _is_reached(ceiling: Ceiling, count: Count) -> bool:
    grown_tokens = count.text_tokens - ceiling.text_tokens
    has_grown = grown_tokens >= ceiling.highest_tokens * _GROWN_RATIO
    # Where a cache serves what is not counted, counts follow the text only at first.
    least_tokens = ceiling.highest_tokens * _LEAST_RATIO
    is_full = min(count.real_tokens, ceiling.followed_tokens) >= least_tokens
    return is_full and (has_grown or ceiling.same_count >= _SAME_COUNT)
