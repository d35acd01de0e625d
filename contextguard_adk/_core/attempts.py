"""The attempts to send a request that a provider found too long: one table, in order.

Each attempt makes the request smaller in its own way. `Recovery` sends the contents
that an attempt returns, and goes on with the next attempt if they are still too long.
An attempt returns None if it does not apply to the request.

Heuristic tokens are the bytes of a request / 4. The ratio is the tokens of the model
per heuristic token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk import _shapes
from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.fit import minimize
from contextguard_adk._core.limits import (
    read_limits,
    remember_limits,
    reserve_output,
    resolve_model,
)
from contextguard_adk._core.look import build_turn
from contextguard_adk._core.loop import declare_tools, look_and_act
from contextguard_adk._core.rejections import is_of_asked_model
from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION, MAX_RATIO
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._providers.overflow import Overflow
from contextguard_adk._summaries.compose import shape
from contextguard_adk._turn.units import Contents

# The output may take this part of the limit less the prompt. The rest is a reserve,
# because a provider may count a few tokens more than the rejection names.
_OUTPUT_RATIO = 0.98

# `keep_least` lets contents take the first of these parts of the last request less its
# instruction and tools, or the second part of the window if that is more.
_LEAST_ROOM_RATIO = 0.4
_LEAST_WINDOW_RATIO = 0.1

# If a rejection names no size, and the known ratio does not explain it, the request is
# taken to exceed the limit by a tenth.
_EXCEEDED_RATIO = 1.1


@dataclass
class Rejected:
    """A request that was rejected, and the requests that were tried in its place.

    Attributes:
        call: The model call of the request.
        request: The request as it was rejected. Requests that are sent again have the
            same config, and other contents.
        bounds: The bounds of the next request.
        tried_tokens: The heuristic tokens of each request that was sent, newest last.
            The first one is the rejected request, so the list is never empty.
        sent_ratio: The ratio of the rejected request, by its estimate before it was
            sent.
    """

    call: Call
    request: LlmRequest
    bounds: Bounds
    tried_tokens: list[int]
    sent_ratio: float

    @property
    def ratio(self) -> float:
        """The ratio that rejections have shown, else the estimated one."""
        return self.bounds.correction or self.sent_ratio

    def shape(self, contents: Contents) -> list[types.Content]:
        """Returns contents in the form in which they are sent."""
        turn = build_turn(self.call, self.bounds)
        return shape(turn, list(contents))

    def measure(self, shaped: Contents) -> int:
        """Returns the heuristic tokens of a request with these contents.

        Args:
            shaped: Contents in the form in which they are sent.
        """
        contents_tokens = self.call.memo.estimate_tokens(shaped)
        return estimate_config_tokens(self.request.config) + contents_tokens

    def is_smaller(self, contents: Contents) -> bool:
        """Returns whether contents make a smaller request than the last one sent."""
        last_tokens = self.tried_tokens[-1]
        return self.measure(self.shape(contents)) < last_tokens

    def learn_ratio(self, overflow: Overflow) -> None:
        """Sets the ratio to that of the newest rejection, from 1 to `MAX_RATIO`.

        Another model may have another vocabulary, so the ratio is remembered only if
        the asked model has rejected the request.
        """
        at_least_1 = max(1.0, self._find_ratio(overflow))
        ratio = min(at_least_1, MAX_RATIO)
        self.bounds = replace(self.bounds, correction=ratio)
        if ratio > DEFAULT_CORRECTION and is_of_asked_model(self.call, overflow):
            # Without a count, later calls would assume the default.
            memory = self.call.memory
            seen = memory.facts.of(self.call.model)
            memory.remember_seen(self.call.model, replace(seen, correction=ratio))

    def _find_ratio(self, overflow: Overflow) -> float:
        """Returns the ratio that a rejection of the last request shows.

        Args:
            overflow: The rejection. A number that the rejection does not name is None.
        """
        heuristic_tokens = max(1, self.tried_tokens[-1])

        # First case: the rejection names the size of the request.
        named_tokens = overflow.prompt_tokens
        if named_tokens is not None:
            output_tokens = 0
            if overflow.period:
                # The size that a rate limit names includes the reserved output.
                model = resolve_model(self.call, self.bounds)
                output_tokens = model.reserved_output_tokens
            return (named_tokens - output_tokens) / heuristic_tokens

        # Second case: by the known ratio, the prompt is above the limit for prompts.
        # This is always the case if the rejection names no limit.
        known_ratio = self.call.counts.measured_correction or DEFAULT_CORRECTION
        limit_tokens = overflow.limit_tokens or 0
        prompt_limit_tokens = limit_tokens - (overflow.output_tokens or 0)
        if known_ratio * heuristic_tokens > prompt_limit_tokens:
            return known_ratio

        # Third case: the known ratio is too low, because the request was rejected.
        return prompt_limit_tokens * _EXCEEDED_RATIO / heuristic_tokens


class Attempt(NamedTuple):
    """A row of the table.

    Attributes:
        name: The name of the attempt in the metric of recoveries.
        prepare: Returns the contents to send; None if the attempt does not apply.
    """

    name: str
    prepare: Callable[[Rejected, Overflow], Awaitable[list[types.Content] | None]]


async def lower_output(
    rejected: Rejected, overflow: Overflow
) -> list[types.Content] | None:
    """Lowers the output limit of the rejected request to the room beside its prompt.

    For example, the limit is 8,192 tokens, the prompt takes 6,000 and the output limit
    is 4,096. Then the new output limit is 2,148, which is 98 % of 2,192.

    Returns:
        The contents of the rejected request. None if a lower output limit cannot help,
        or if the prompt leaves too little room for an answer.
    """
    limit_tokens = overflow.limit_tokens
    prompt_tokens = overflow.prompt_tokens
    if not overflow.is_input_plus_output:
        # The prompt alone was too long.
        return None
    if limit_tokens is None or prompt_tokens is None:
        # Nobody knows the room beside the prompt.
        return None

    call = rejected.call
    left_tokens = limit_tokens - prompt_tokens
    is_enough = reserve_output(call, int(left_tokens * _OUTPUT_RATIO))
    if not is_enough:
        return None

    if is_of_asked_model(call, overflow):
        # From now on, `fit_output` lowers the output limit of each request that needs
        # it.
        limits = read_limits(call.guard, call)
        refused_tokens = overflow.output_tokens or left_tokens
        remember_limits(call.guard, call, replace(limits, output_tokens=refused_tokens))
    new_config = {"config": call.request.config}
    rejected.request = rejected.request.model_copy(update=new_config)
    return list(rejected.request.contents)


async def relieve_shapes(
    rejected: Rejected, overflow: Overflow
) -> list[types.Content] | None:
    """Lets images and files take fewer bytes of the request.

    A shape gives contents the form in which they are sent. A shape that limits images
    and files has a function `relieve`, which returns a lower limit for them.

    Returns:
        The contents of the rejected request, which get their new form when they are
        sent. None if no shape has a lower limit.
    """
    contents = list(rejected.request.contents)
    turn = build_turn(rejected.call, rejected.bounds)
    for each in _shapes.SHAPES:
        if each.relieve is None:
            continue

        limit = each.relieve(turn, overflow, contents)
        if limit is not None:
            # The shape reads the limit from the memory when it forms the contents.
            rejected.call.memory.remember_unit(limit)
            return contents
    return None


async def put_in_summary(
    rejected: Rejected, overflow: Overflow
) -> list[types.Content] | None:
    """Puts a summary in the request: one that is ready, else a new one.

    Returns:
        The contents with the summary. None if this recovery has paid for a summary
        before, if no other summary takes the place of the stored one, or if the request
        gets no smaller.
    """
    call = rejected.call
    # A recovery pays for one summary only. If the contents already have the stored
    # summary as a message, a new summary would be a summary of this message.
    may_compact = not (call.is_recovery_paid or rejected.bounds.is_rendered)
    if not may_compact:
        return None

    rejected.learn_ratio(overflow)
    summary_before = call.state.record.summary
    turn = await look_and_act(call, rejected.bounds)
    is_new_stored = call.state.record.summary is not summary_before
    if not is_new_stored:
        return None

    declare_tools(call, turn)
    contents = list(turn.contents)
    return contents if rejected.is_smaller(contents) else None


async def keep_least(
    rejected: Rejected, overflow: Overflow
) -> list[types.Content] | None:
    """Keeps only the summary, the user's request and the newest contents.

    The kept contents may take 40 % of the room for contents, or a tenth of the window
    if that is more. The room is the size of the last request less the instruction and
    the tools. A request above the size of the window counts as the window.

    Returns:
        The kept contents; None if the request gets no smaller.
    """
    rejected.learn_ratio(overflow)
    ratio = rejected.ratio
    turn = build_turn(rejected.call, rejected.bounds)
    window_tokens = turn.budgets.window_tokens
    last_tokens = rejected.tried_tokens[-1] * ratio
    last_tokens_in_window = min(window_tokens, last_tokens)

    # By the ratio, instruction and tools alone may fill the request. But the ratio is
    # an estimate, so contents get a tenth of the window even then.
    left_tokens = last_tokens_in_window - turn.size.config_tokens * ratio
    least_tokens = window_tokens * _LEAST_WINDOW_RATIO
    room_tokens = max(left_tokens * _LEAST_ROOM_RATIO, least_tokens)

    contents = minimize(turn, int(room_tokens), ratio)
    return contents if rejected.is_smaller(contents) else None


ATTEMPTS = (
    Attempt("output", lower_output),
    Attempt("media", relieve_shapes),
    Attempt("compaction", put_in_summary),
    Attempt("compaction", put_in_summary),
    Attempt("minimal", keep_least),
    Attempt("minimal", keep_least),
)
"""The attempts in their order. The first one that the model answers is the last.

The first compaction may put in a summary that is ready. If that is not enough, the
second compaction has a new summary written. The second minimal request may have 40 % of
the contents of the first.
"""
