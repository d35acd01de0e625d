"""The attempts after a provider has found a request too long: one table, in order."""

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
from contextguard_adk._core.look import look
from contextguard_adk._core.loop import declare_tools, settle
from contextguard_adk._core.rejections import learn
from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION, MAX_RATIO
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._providers.overflow import Overflow
from contextguard_adk._summaries.compose import shape
from contextguard_adk._turn.units import Contents

# The part of the tokens beside the prompt that the output may take at most.
_OUTPUT_RATIO = 0.98

# `keep_least` lets contents take this part of the tokens beside instruction and tools,
# and in any case this part of the window.
_LEAST_ROOM_RATIO = 0.4
_LEAST_WINDOW_RATIO = 0.1

# A request that was rejected without a size is taken to exceed the limit by a tenth.
_EXCEEDED_RATIO = 1.1


@dataclass
class Rejected:
    """A request that was rejected, and the requests that were tried in its place.

    Attributes:
        call: The model call that it belongs to.
        request: The request as it was rejected. Requests that are sent again have its
            config, and other contents.
        bounds: The bounds of the next request.
        tried_tokens: Bytes / 4 of each request that was sent, newest last.
        sent_ratio: The first estimate of the request in tokens of the model, divided by
            its bytes / 4.
    """

    call: Call
    request: LlmRequest
    bounds: Bounds
    tried_tokens: list[int]
    sent_ratio: float

    @property
    def ratio(self) -> float:
        """Tokens of the model per byte / 4, as far as rejections have shown them."""
        return self.bounds.correction or self.sent_ratio

    def shape(self, contents: Contents) -> list[types.Content]:
        """Gives contents the form in which they are sent."""
        return shape(look(self.call, self.bounds), list(contents))

    def measure(self, shaped: Contents) -> int:
        """Returns bytes / 4 of a request with these contents."""
        contents_tokens = self.call.memo.estimate_tokens(shaped)
        return estimate_config_tokens(self.request.config) + contents_tokens

    def is_smaller(self, contents: Contents) -> bool:
        """Returns whether a request with these contents is smaller than the newest."""
        return self.measure(self.shape(contents)) < self.tried_tokens[-1]

    def learn_ratio(self, overflow: Overflow) -> None:
        """Corrects the tokens of the model per byte / 4 by the newest rejection.

        The next request is measured by the new ratio, which is from 1 to `MAX_RATIO`.
        """
        at_least_1 = max(1.0, self._read_ratio(overflow))
        correction = min(at_least_1, MAX_RATIO)
        self.bounds = replace(self.bounds, correction=correction)
        if correction > DEFAULT_CORRECTION:
            # A later run needs the ratio only if the provider reports no usage.
            learn(self.call, correction=round(correction, 2))

    def _read_ratio(self, overflow: Overflow) -> float:
        """Returns the tokens of the model per byte / 4 of the newest request.

        There are three cases, in this order:
        - The rejection names the size of the request.
        - By the known ratio, the request is larger than the limit: that ratio holds.
        - Otherwise the known ratio is too low. The request is taken to be a tenth
          larger than the limit.
        """
        call = self.call
        sent_tokens = max(1, self.tried_tokens[-1])
        stated_tokens = overflow.prompt_tokens
        if stated_tokens is not None:
            output_tokens = 0
            if overflow.period:  # A rate limit counts the reserved output as well.
                model = resolve_model(call, self.bounds)
                output_tokens = model.reserved_output_tokens
            return (stated_tokens - output_tokens) / sent_tokens

        known_ratio = call.counts.measured_correction or DEFAULT_CORRECTION
        limit_tokens = (overflow.limit_tokens or 0) - (overflow.output_tokens or 0)
        if known_ratio * sent_tokens > limit_tokens:
            return known_ratio
        return limit_tokens * _EXCEEDED_RATIO / sent_tokens


class Attempt(NamedTuple):
    """A row of the table.

    Attributes:
        kind: The name of the attempt in the metric of recoveries.
        prepare: Returns the contents to send; None if the attempt does not apply.
    """

    kind: str
    prepare: Callable[[Rejected, Overflow], Awaitable[list[types.Content] | None]]


async def lower_output(
    rejected: Rejected, overflow: Overflow
) -> list[types.Content] | None:
    """Reserves less output, and sends the same contents.

    It applies only if the sum of input and output was too much, and if the input leaves
    enough room for an answer.
    """
    limit_tokens = overflow.limit_tokens
    prompt_tokens = overflow.prompt_tokens
    if not overflow.is_input_plus_output:
        return None
    if limit_tokens is None or prompt_tokens is None:
        return None

    call = rejected.call
    left_tokens = limit_tokens - prompt_tokens
    if not reserve_output(call, int(left_tokens * _OUTPUT_RATIO)):
        return None

    learn(call, output_tokens=overflow.output_tokens or left_tokens)
    update = {"config": call.request.config}
    rejected.request = rejected.request.model_copy(update=update)
    return list(rejected.request.contents)


async def relieve_shapes(
    rejected: Rejected, overflow: Overflow
) -> list[types.Content] | None:
    """Lets one shape take fewer tokens, and sends the same contents.

    A shape gives contents a form that providers want; one is for images and files. The
    attempt does not apply if no shape can take less.
    """
    contents = list(rejected.request.contents)
    turn = look(rejected.call, rejected.bounds)
    for row in _shapes.SHAPES:
        relief = row.relieve(turn, overflow, contents) if row.relieve else None
        if relief is not None:
            rejected.call.memory.keep(relief)  # The shape reads it when it is applied.
            return contents
    return None


async def compact(rejected: Rejected, overflow: Overflow) -> list[types.Content] | None:
    """Puts a summary in the request: one that is ready, else a new one.

    The attempt does not apply in four cases:
    - This recovery has already let the strategy compact.
    - The contents hold the stored summary, which a new one would summarize.
    - No new summary was stored.
    - The request gets no smaller.
    """
    call = rejected.call
    if call.is_recovery_paid or rejected.bounds.is_rendered:
        return None

    rejected.learn_ratio(overflow)
    summary_before = call.state.record.summary
    turn = await settle(call, rejected.bounds)
    if call.state.record.summary is summary_before:
        return None

    declare_tools(call, turn)
    contents = list(turn.contents)
    return contents if rejected.is_smaller(contents) else None


async def keep_least(
    rejected: Rejected, overflow: Overflow
) -> list[types.Content] | None:
    """Keeps summary, current request and the newest contents, in 40 % of the room.

    The room is the smaller of the window and the newest request, without instruction
    and tools. It is at least a tenth of the window. The attempt does not apply if the
    request gets no smaller.
    """
    rejected.learn_ratio(overflow)
    ratio = rejected.ratio
    turn = look(rejected.call, rejected.bounds)
    window_tokens = turn.budgets.window_tokens
    request_tokens = min(window_tokens, rejected.tried_tokens[-1] * ratio)

    # By the ratio, instruction and tools alone may fill the request. The ratio is an
    # estimate, so some room is assumed even then.
    left_tokens = request_tokens - turn.size.config_tokens * ratio
    least_tokens = window_tokens * _LEAST_WINDOW_RATIO
    room_tokens = int(max(left_tokens * _LEAST_ROOM_RATIO, least_tokens))

    contents = minimize(turn, room_tokens, ratio)
    return contents if rejected.is_smaller(contents) else None


ATTEMPTS = (
    Attempt("output", lower_output),
    Attempt("media", relieve_shapes),
    Attempt("compaction", compact),
    Attempt("compaction", compact),
    Attempt("minimal", keep_least),
    Attempt("minimal", keep_least),
)
"""Each row is tried once, in this order, until the model has answered."""
