"""What a provider's count says: it is evidence of a request's size, not the size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from operator import is_

from google.genai import types

from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.limits import find_limits, resolve_model
from contextguard_adk._history.contents import parts_of
from contextguard_adk._measuring.calibration import (
    MAX_RATIO,
    correction_factor,
    estimate_prompt_tokens,
    request_script_discount,
)
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens, media_bytes
from contextguard_adk._runtime.memory import Seen
from contextguard_adk._runtime.runs import SentCall
from contextguard_adk._turn.facts import Count, Counts

# Of bytes / 4, less what the scripts of a text may save: Georgian takes 0.42 of it,
# Hindi 0.45. A lower count leaves out what a cache held, or what was cut.
_LEAST_RATIO = 0.5
_LEAST_SENT_TOKENS = 4_000  # Of less, bytes / 4 say little.

# How many times the estimate of the very request a count may be: at first, later than
# what was usual, with room for a chat template. More is believed if it is repeated.
_MOST_RATIO = 5.0
_USUAL_RATIO = 2.5
_TEMPLATE_TOKENS = 500

Sent = tuple[Sequence[types.Content], types.GenerateContentConfig | None, int]


def read_counts(call: Call) -> Counts:
    """Returns what the provider counted last, and what follows from it.

    What no answer of this process has shown is no count where it is more than the
    window, or far more than what was sent.
    """
    state = call.state
    facts = call.memory.facts
    model = call.model
    real = int(state.read("real_tokens") or 0)
    last = int(state.read("last_heuristic") or 0)
    window_tokens = resolve_model(call, Bounds()).known_window_tokens
    most_tokens = min(window_tokens, MAX_RATIO * last or window_tokens)
    if real > max(most_tokens, facts.of(model).accepted_tokens):
        real = 0
    learned = find_limits(call).correction
    if facts.counting_model not in ("", model):
        # What another model counted, by its own vocabulary, says nothing of this one.
        counted = facts.of(model).counted
        learned = correction_factor(*counted) if counted else learned
        real = last = 0
    if not (real and last):
        return Counts(real or None, last or None, learned, learned)
    correction = correction_factor(real, last)
    measured = max(correction, min(real / last, MAX_RATIO))
    return Counts(real, last, correction, measured)


def least_tokens(seen: Seen, heuristic_tokens: int) -> int:
    """Returns what a request takes at least, by the provider's last count.

    Half of bytes / 4 where it has counted nothing in this process.
    """
    if seen.counted is None:
        return heuristic_tokens // 2
    real_tokens, counted_tokens = seen.counted
    return heuristic_tokens * real_tokens // max(1, counted_tokens)


def weigh_count(call: SentCall, real_tokens: int, memo: Memo) -> Count | None:
    """Compares a count with what was sent, as later callbacks have left it.

    None where the answer was counted before.
    """
    if not call.sent_contents:
        return None
    sent = contents, config, heuristic_tokens = _read_sent(call, memo)
    parts = itertools.chain.from_iterable(map(parts_of, contents))
    media_tokens = sum(map(media_bytes, parts)) // 4
    is_behind = False
    least_tokens = heuristic_tokens * _LEAST_RATIO
    if real_tokens < least_tokens and heuristic_tokens > _LEAST_SENT_TOKENS:
        discount = media_tokens + request_script_discount(contents, config, memo)
        is_behind = real_tokens < least_tokens - discount * _LEAST_RATIO
    is_size = not is_behind and _is_size(call, real_tokens, sent, memo)
    text_tokens = heuristic_tokens - media_tokens
    return Count(real_tokens, heuristic_tokens, text_tokens, is_size)


def _read_sent(call: SentCall, memo: Memo) -> Sent:
    """Returns what was sent, and its bytes / 4: callbacks after the guard may edit."""
    sent = call.sent_contents
    config = call.sent_config
    request = call.request()
    # ADK's Gemini class takes out of the request what a cache holds.
    edited = request.contents if request and not request.config.cached_content else sent
    if request is None or (len(edited) == len(sent) and all(map(is_, edited, sent))):
        return sent, config, call.heuristic_tokens
    tokens = memo.estimate_tokens(edited) + estimate_config_tokens(request.config)
    return edited, request.config, tokens


def _is_size(call: SentCall, real_tokens: int, sent: Sent, memo: Memo) -> bool:
    """Whether a count may be the size of one request, not the sum of several."""
    contents, config, heuristic_tokens = sent
    window_tokens = call.stated_window_tokens
    if real_tokens > (window_tokens or real_tokens) and not call.is_observed:
        return False
    if config is not None and config.cached_content:
        return True  # It counts what nobody here sees.
    model = call.model
    seen = call.memory.facts.of(model)
    more_tokens = max(0, real_tokens - _TEMPLATE_TOKENS)
    estimated_tokens = max(1, heuristic_tokens)  # It is at least that.
    if more_tokens > heuristic_tokens * _USUAL_RATIO:
        estimated_tokens = estimate_prompt_tokens(
            heuristic_tokens, None, None, contents, config=config, memo=memo
        )
    ratio = more_tokens / estimated_tokens
    usual = max(1.0, seen.lowest_ratio) * _USUAL_RATIO
    is_usual = ratio <= (usual if seen.lowest_ratio else _MOST_RATIO)
    # A vocabulary that takes more for a script, or what a gateway adds to all requests.
    doubted_ratio, doubted_tokens = seen.doubted
    is_same = ratio <= _MOST_RATIO and _is_near(ratio, doubted_ratio, 0.1)
    is_same |= _is_near(more_tokens - estimated_tokens, doubted_tokens, 0.03)
    if is_usual:
        lowest = min(ratio, seen.lowest_ratio or ratio)
        shown = replace(seen, doubted=(0.0, 0), lowest_ratio=lowest)
    else:
        shown = replace(seen, doubted=(ratio, more_tokens - estimated_tokens))
    call.memory.see(model, shown)
    return is_usual or is_same


def _is_near(value: float, before: float, most: float) -> bool:
    return bool(before) and abs(value / before - 1) < most
