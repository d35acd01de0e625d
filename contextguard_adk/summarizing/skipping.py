"""When a compaction that is due is better skipped: no loops, nothing for nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from contextguard_adk.measuring.calibration import request_script_discount
from contextguard_adk.measuring.tokens import estimate_contents_tokens

if TYPE_CHECKING:
    from contextguard_adk.summarizing.context import CompactionContext

logger = logging.getLogger("contextguard_adk.skipping")


def should_skip_compaction(context: CompactionContext) -> bool:
    """Whether a compaction would gain nothing, or follows another at once.

    A request that would hardly be accepted is always worth a try, and so is what
    someone demands. Asked once for a call.
    """
    budgets, session = context.budgets, context.summarizer.session
    was_just_compacted = session.was_just_compacted
    session.was_just_compacted = False
    if context.reason != "tokens":
        return False
    is_overfull = context.tokens >= budgets.overfull_tokens
    if not is_overfull and (was_just_compacted or _gained_nothing(context)):
        return True
    if not context.is_due:
        return False
    fixed_tokens = _fixed_tokens(context)
    if fixed_tokens >= budgets.threshold_tokens:
        _warn_once(context, fixed_tokens)
        if fixed_tokens >= budgets.overfull_tokens or not is_overfull:
            return True
    if is_overfull:
        return False
    # The live request would be quoted again.
    view = context.view
    new = [view.contents[i] for i in view.uncovered if i != view.live_index]
    new_tokens = context.measure(new) - context.measure([])
    return new_tokens < budgets.summary_tokens // 2


def _gained_nothing(context: CompactionContext) -> bool:
    """Whether the last compaction gained nothing, and little has come since."""
    dropped_tokens = context.summarizer.session.dropped_tokens
    if dropped_tokens is None:
        return False
    return context.tokens - dropped_tokens < context.budgets.summary_tokens // 2


def _fixed_tokens(context: CompactionContext) -> int:
    """What no compaction removes, on the scale of the estimate.

    A compaction's own measure is never below bytes / 4. The estimate of the request may
    be, and this part of it as far as its own scripts explain it.
    """
    fixed_tokens = context.fixed_tokens
    contents_tokens = estimate_contents_tokens(context.contents)
    heuristic_tokens = context.config_heuristic_tokens + contents_tokens
    if context.tokens >= heuristic_tokens:
        return fixed_tokens
    config = context.summarizer.request.config
    discount_tokens = request_script_discount(context.fixed_contents, config)
    lowered_tokens = fixed_tokens * context.tokens // heuristic_tokens
    return max(lowered_tokens, fixed_tokens - discount_tokens)


def _warn_once(context: CompactionContext, fixed_tokens: int) -> None:
    """Says once for a session that its history is not the problem."""
    session = context.summarizer.session
    if session.is_fixed_part_reported:
        return
    session.is_fixed_part_reported = True
    logger.warning(
        "System instruction, tools and other context of agent %r take %d of %d tokens "
        "alone, the threshold is %d: compaction cannot help. Use a larger window or "
        "less instruction.",
        context.agent,
        fixed_tokens,
        context.budgets.window_tokens,
        context.budgets.threshold_tokens,
    )
