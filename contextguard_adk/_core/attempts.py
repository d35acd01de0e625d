"""The attempts to send a request that a provider found too long: one table, in order.

Each attempt makes the request smaller in its own way. `Recovery` sends the contents
that an attempt returns, and goes on with the next attempt if they are still too long.
An attempt returns None if it does not apply to the request.

Bytes / 4 of a request are its heuristic tokens. The ratio is the tokens of the model
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
from contextguard_adk._core.limits import reserve_output, resolve_model
from contextguard_adk._core.look import build_turn
from contextguard_adk._core.loop import declare_tools, settle
from contextguard_adk._core.rejections import learn
from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION, MAX_RATIO
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._providers.overflow import Overflow
from contextguard_adk._summaries.compose import shape
from contextguard_adk._turn.units import Contents

# The output may take this part of the tokens that the prompt leaves. The rest is a
# reserve, because a provider may count a few tokens more than it names.
_OUTPUT_RATIO = 0.98

# `keep_least` lets contents take the first part of the tokens that instruction and
# tools leave. If that is less, contents may take the second part of the window.
_LEAST_ROOM_RATIO = 0.4
_LEAST_WINDOW_RATIO = 0.1

# A request that was rejected without a size is taken to exceed the limit by a tenth.
_EXCEEDED_RATIO = 1.1


@dataclass
class Rejected:
    """A request that was rejected, and the requests that were tried in its place.

    Attributes:
        call: The model call that it belongs to.
        request: The request as it was rejected. Requests that are sent again have the
            same config, and other contents.
        bounds: The bounds of the next request.
        tried_tokens: Bytes / 4 of each request that was sent, newest last.
        sent_ratio: The ratio of the first request, as it was estimated.
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
        """Gives contents the form in which they are sent."""
        turn = build_turn(self.call, self.bounds)
        return shape(turn, list(contents))

    def measure(self, shaped: Contents) -> int:
        """Returns bytes / 4 of a request with contents that have this form."""
        contents_tokens = self.call.memo.estimate_tokens(shaped)
        return estimate_config_tokens(self.request.config) + contents_tokens

    def is_smaller(self, contents: Contents) -> bool:
        """Returns whether a request with contents is smaller than the last one sent."""
        last_tokens = self.tried_tokens[-1]
        return self.measure(self.shape(contents)) < last_tokens

    def learn_ratio(self, overflow: Overflow) -> None:
        """Corrects the ratio by the newest rejection; it is from 1 to `MAX_RATIO`."""
        at_least_1 = max(1.0, self._find_ratio(overflow))
        ratio = min(at_least_1, MAX_RATIO)
        self.bounds = replace(self.bounds, correction=ratio)
        if ratio > DEFAULT_CORRECTION:
            # The next process assumes the default, so a higher ratio is stored.
            learn(self.call, correction=round(ratio, 2))

    def _find_ratio(self, overflow: Overflow) -> float:
        """Returns the ratio of the last request that was sent."""
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

        # Second case: the known ratio explains that the request is above the limit.
        known_ratio = self.call.counts.measured_correction or DEFAULT_CORRECTION
        limit_tokens = (overflow.limit_tokens or 0) - (overflow.output_tokens or 0)
        if known_ratio * heuristic_tokens > limit_tokens:
            return known_ratio

        # Third case: the known ratio is too low.
        return limit_tokens * _EXCEEDED_RATIO / heuristic_tokens


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
    """Lowers the output limit of the request to the room beside its prompt.

    For example, the limit is 8,192 tokens, the prompt takes 6,000 and the output limit
    is 4,096. Then the new output limit is 2,148, which is 98 % of 2,192.

    Returns:
        The same contents. None if a lower output limit cannot help, or if the prompt
        leaves too little room for an answer.
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

    # From now on `fit_output` lowers the output limit of each request that needs it.
    learn(call, output_tokens=overflow.output_tokens or left_tokens)
    new_config = {"config": call.request.config}
    rejected.request = rejected.request.model_copy(update=new_config)
    return list(rejected.request.contents)


async def relieve_shapes(
    rejected: Rejected, overflow: Overflow
) -> list[types.Content] | None:
    """Lets images and files take fewer bytes of the request.

    A shape gives contents the form in which they are sent. The shape that limits images
    and files is the one that can take less.

    Returns:
        The same contents, which get their form when they are sent. None if no shape can
        take less.
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
        The contents with the summary. None if no summary may be written, if none was
        stored, or if the request gets no smaller.
    """
    call = rejected.call
    # A recovery pays for one summary only. If the stored summary is already among the
    # contents, the new one would be a summary of it.
    may_compact = not (call.is_recovery_paid or rejected.bounds.is_rendered)
    if not may_compact:
        return None

    rejected.learn_ratio(overflow)
    summary_before = call.state.record.summary
    turn = await settle(call, rejected.bounds)
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

    They may take 40 % of the last request that was sent, without its instruction and
    tools.

    Returns:
        The kept contents; None if the request gets no smaller.
    """
    rejected.learn_ratio(overflow)
    ratio = rejected.ratio
    turn = build_turn(rejected.call, rejected.bounds)
    window_tokens = turn.budgets.window_tokens
    last_tokens = rejected.tried_tokens[-1] * ratio
    request_tokens = min(window_tokens, last_tokens)

    # The ratio is an estimate. By the ratio, instruction and tools alone may fill the
    # request. Contents get a tenth of the window even then.
    left_tokens = request_tokens - turn.size.config_tokens * ratio
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
"""The attempts in their order, until the model has answered.

The first compaction may put in a summary that is ready. If that is not enough, the
second one has a new summary written. The second minimal request is smaller than the
first, because its room is a part of the first.
"""
