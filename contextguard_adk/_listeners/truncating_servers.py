"""Recognizes servers that cut a prompt silently, as Ollama does, by what they count."""

from __future__ import annotations

import itertools
import logging

from contextguard_adk._history.contents import parts_of
from contextguard_adk._measuring.calibration import request_script_discount
from contextguard_adk._measuring.tokens import Memo, media_bytes
from contextguard_adk._runtime.runs import SentCall
from contextguard_adk._runtime.sessions import Counted
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.units import Answered, Listener

logger = logging.getLogger("contextguard_adk.limits")

# Of what the text takes; a count below it means that the server cut the prompt. Text
# takes bytes / 4 less what its scripts may: Georgian 0.42 of bytes / 4, Hindi 0.45.
_TRUNCATION_RATIO = 0.5
_MIN_TRUNCATED_TOKENS = 2_048  # The smallest default that Ollama has had.
_MIN_GROWTH_TOKENS = 1_000  # Of less, bytes / 4 say little.


class TruncatingServers(Listener):
    """Learns the window of a server that counts far less than it was sent."""

    def answered(self, event: Answered) -> None:
        """Compares the provider's count with what was sent."""
        call, real_tokens = event.call, event.real_tokens
        if not (real_tokens and call.sent_contents):
            return  # The second whole response of a stream is ignored.
        usage = event.response.usage_metadata
        cached = usage.cached_content_token_count if usage else None
        memo = event.run.memo(event.context.get_invocation_context())
        # Some leave out of the count what a cache held.
        is_truncated = None if cached else _is_truncated(call, real_tokens, memo)
        text_tokens = call.heuristic_tokens - _media_tokens(call)
        _note_count(call, event.state, real_tokens, is_truncated, text_tokens)


def _is_truncated(call: SentCall, real_tokens: int, memo: Memo) -> bool:
    """Whether the provider counted too little for all the text that was sent."""
    suspect_tokens = call.heuristic_tokens * _TRUNCATION_RATIO
    if real_tokens >= suspect_tokens or suspect_tokens <= 2_000:
        return False
    discount_tokens = _media_tokens(call) + request_script_discount(
        call.sent_contents, call.sent_config, memo
    )
    return real_tokens < suspect_tokens - discount_tokens * _TRUNCATION_RATIO


def _media_tokens(call: SentCall) -> int:
    """What the images and files of a request were taken for: counts of them vary."""
    parts = itertools.chain.from_iterable(map(parts_of, call.sent_contents))
    return sum(map(media_bytes, parts)) // 4


def _note_count(
    call: SentCall,
    state: AgentState,
    real_tokens: int,
    is_truncated: bool | None,
    text_tokens: int,
) -> None:
    """Compares what was learned of a model with what it has just accepted.

    A server that truncates silently counts no more than its window, whatever is sent:
    far less than was sent (`is_truncated`, None where a count tells nothing), or no
    more than for the call before, which sent less.
    """
    facts, model = call.session.facts, call.model
    before = facts.counted if facts.counted.model == model else Counted()
    grown_tokens = text_tokens - before.text_tokens
    added_tokens = real_tokens - before.real_tokens
    if is_truncated is False and before.real_tokens:
        has_grown = grown_tokens >= _MIN_GROWTH_TOKENS
        is_truncated = has_grown and added_tokens < grown_tokens / 10
    is_behind = bool(is_truncated) and real_tokens >= _MIN_TRUNCATED_TOKENS // 2
    counted = Counted(model, real_tokens, text_tokens, is_behind)
    call.session.note(counted=counted)
    learned = state.record.of(model).learned_window_tokens
    if learned is not None and real_tokens > learned:
        state.learn(model, window_tokens=real_tokens if is_truncated else None)
    # Of text with many blanks a count is low as well, but it grows with the text.
    elif is_behind and before.is_behind and added_tokens < grown_tokens / 4:
        shown = max(before.real_tokens, real_tokens, _MIN_TRUNCATED_TOKENS)
        if shown < call.window_tokens:
            state.learn(model, window_tokens=shown)
            _warn_truncation(state.agent, shown, call.window_tokens)


def _warn_truncation(agent: str, shown_tokens: int, window_tokens: int) -> None:
    message = (
        "The provider counted far fewer prompt tokens for agent %r than were sent, "
        f"twice running: it seems to truncate silently. Its window is taken to be "
        f"{shown_tokens} tokens in place of {window_tokens}; set `context_window`."
    )
    warn_once(logger, message, agent)
