"""When a compaction is worth its price, and from where on the next one is."""

from __future__ import annotations

import logging

from contextguard_adk._measuring.budgets import plan_budgets
from contextguard_adk._measuring.calibration import request_script_discount
from contextguard_adk._providers.costs import TYPICAL_COSTS, Costs
from contextguard_adk._providers.windows import resolve_costs
from contextguard_adk._summarizing.compaction import Compaction
from contextguard_adk._summarizing.compose import Draft
from contextguard_adk._summarizing.context import CompactionContext
from contextguard_adk.strategies.base import LEAST_AUTO_TOKENS

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


def choose_trigger(context: CompactionContext, compaction: Compaction) -> int:
    """Finds the trigger at which calls like those so far cost least, in tokens.

    Up to it each call pays for all that stands in the request; there a summary is
    written, and what it leaves is new to the prompt cache. 0 where `trigger` is not
    "auto".
    """
    view, summarizer = context.view, context.summarizer
    session, settings = summarizer.session, summarizer.settings
    if getattr(settings, "trigger", None) != "auto":
        return 0
    model = summarizer.request.model or ""
    costs = resolve_costs(model, summarizer.prices, summarizer.registry)
    cached_price, output_price = _find_price_ratios(costs)
    if session.cached_ratio < 0.5:
        cached_price = 1.0
    reading_price = cached_price if context.summarizer.is_in_place_wanted else 1.0
    if not compaction.attempts:
        reading_price = output_price = 0.0
    fixed_tokens = context.fixed_tokens
    start_tokens = view.stored.left_tokens if view.stored else fixed_tokens
    past_calls = sum(view.contents[index].role == "model" for index in view.uncovered)
    grown_tokens = context.measure(context.contents) - start_tokens
    growth = max(1.0, grown_tokens / max(1, past_calls))
    written_tokens = context.count(compaction.stored.text)
    written_ratio = min(1.0, written_tokens / context.budgets.summary_tokens)
    kept_tokens = max(0, compaction.tokens - fixed_tokens - written_tokens)

    def find_cost(trigger_tokens: int) -> float:
        """The price of a call on average, in prompt tokens that no cache serves."""
        budgets = plan_budgets(context.budgets.window_tokens, 0, trigger_tokens)
        summary_tokens = written_ratio * budgets.summary_tokens
        new_tokens = kept_tokens + summary_tokens
        left_tokens = fixed_tokens + new_tokens
        # None comes below twice what the one before has left.
        room = max(trigger_tokens - left_tokens, left_tokens)
        # The request that crosses the trigger, on average by half of a call's growth,
        # is not sent, but summarized.
        calls = max(1.0, room / growth + 0.5)
        once = reading_price * (left_tokens + calls * growth)
        once += output_price * summary_tokens + (1 - cached_price) * new_tokens
        sent_tokens = left_tokens + (calls - 1) / 2 * growth
        each = cached_price * sent_tokens + (1 - cached_price) * growth
        return each + once / calls

    most = context.budgets.full_tokens
    least = min(most, LEAST_AUTO_TOKENS)
    count = 64
    steps = ((most / least) ** (step / count) for step in range(count + 1))
    return min((int(least * step) for step in steps), key=find_cost)


def _find_price_ratios(costs: Costs | None) -> tuple[float, float]:
    """The prices of cached and of written tokens; those of uncached ones are 1."""
    known = costs if costs and costs.input else TYPICAL_COSTS
    cached = known.input if known.cached_input is None else known.cached_input
    return cached / known.input, known.output / known.input


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
