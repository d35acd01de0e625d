"""When a compaction is worth its price."""

from __future__ import annotations

import logging

from contextguard_adk._measuring.calibration import request_script_discount
from contextguard_adk._summarizing.compose import Draft
from contextguard_adk._summarizing.context import CompactionContext

logger = logging.getLogger("contextguard_adk.due")


def find_refusal(context: CompactionContext, was_just_compacted: bool) -> str:
    """Why a compaction that somebody asks for is refused; "" where it is not."""
    if was_just_compacted:
        return "the call before was compacted as well"
    covered = context.older_than(0)
    known = context.view.stored.model_text if context.view.stored else ""
    draft = Draft(known, covered, context.view.model_covered, len(known))
    gains = context.render(draft).tokens < context.measure(context.contents)
    return "" if covered and gains else "nothing would be gained"


def should_skip_compaction(
    context: CompactionContext, was_just_compacted: bool
) -> bool:
    """Whether one would gain nothing or follows another at once, and can wait."""
    budgets, session = context.budgets, context.summarizer.session
    if context.reason != "tokens":
        return False
    little_tokens = budgets.summary_tokens // 2
    has_hardly_grown = False
    if (dropped := session.dropped_tokens) is not None:
        # Far below the window nothing presses, and each try is paid for.
        is_early = dropped < budgets.full_tokens
        step_tokens = max(little_tokens, dropped // 8 if is_early else 0)
        has_hardly_grown = context.tokens - dropped < step_tokens
    is_overfull = context.tokens >= budgets.overfull_tokens
    if not is_overfull and (was_just_compacted or has_hardly_grown):
        return True
    if not context.is_due:
        return False
    fixed_tokens = _fixed_tokens(context)
    # A trigger that leaves less room than what no compaction removes is too low.
    if context.tokens < min(budgets.full_tokens, 2 * fixed_tokens):
        return True
    if fixed_tokens >= budgets.full_tokens:
        if not session.is_fixed_part_reported:
            session.is_fixed_part_reported = True
            logger.warning(
                "System instruction, tools and other context of agent %r take %d of %d "
                "tokens alone, the threshold is %d: compaction cannot help. Use a "
                "larger window or less instruction.",
                context.agent,
                fixed_tokens,
                budgets.window_tokens,
                budgets.full_tokens,
            )
        if fixed_tokens >= budgets.overfull_tokens or not is_overfull:
            return True
    # The live request would be quoted again, the newest steps would stay.
    view, stays = context.view, set(context.kept.indexes)
    if context.composer.is_request_whole:
        stays |= {-1 if view.live_index is None else view.live_index}
    new = [view.shown[i] for i in view.uncovered if i not in stays]
    new_tokens = context.measure(new) - context.measure([])
    return not is_overfull and new_tokens < little_tokens


def _fixed_tokens(context: CompactionContext) -> int:
    """What no compaction removes, on the scale of the estimate."""
    fixed_tokens = context.fixed_tokens
    memo = context.view.memo
    heuristic_tokens = memo.estimate_tokens(context.contents)
    heuristic_tokens += context.config_heuristic_tokens
    if context.tokens >= heuristic_tokens:
        return fixed_tokens
    # Below bytes / 4, this part is lowered as far as its scripts explain it.
    config = context.summarizer.request.config
    discount_tokens = request_script_discount(context.fixed_contents, config, memo)
    lowered_tokens = fixed_tokens * context.tokens // heuristic_tokens
    return max(lowered_tokens, fixed_tokens - discount_tokens)
