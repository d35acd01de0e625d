"""What the model of a call takes: its window, its output, and what it has shown."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import NamedTuple

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest

from contextguard_adk._history.state import AgentState
from contextguard_adk._history.stored import AgentRecord
from contextguard_adk._measuring.budgets import Budgets, plan_budgets
from contextguard_adk._measuring.calibration import MAX_RATIO, correction_factor
from contextguard_adk._memory import CallInFlight, Counted, SessionMemory
from contextguard_adk._providers.clients import reserved_output_tokens, thinking_tokens
from contextguard_adk._providers.overflow import MIN_LIMIT_TOKENS, Overflow
from contextguard_adk._providers.windows import (
    ModelRegistry,
    ResolvedWindow,
    resolve_context_window,
)
from contextguard_adk.strategies.base import Strategy
from contextguard_adk.telemetry import warn_once

logger = logging.getLogger("contextguard_adk.limits")

MIN_OUTPUT_TOKENS = 256
"""Less is too little for an answer."""

_WHO_SAID = {
    "configured": "configured",
    "registry": "the model registry says",
    "default": "assumed for an unknown model",
}
_MIN_TRUNCATED_TOKENS = 2_048  # The smallest default that Ollama has had.
_MIN_GROWTH_TOKENS = 1_000  # Of less, bytes / 4 say little.


class Counts(NamedTuple):
    """What the provider counted last; None while it has counted nothing.

    The estimate is capped as documented; what is put together needs no cap.
    """

    real_tokens: int | None
    heuristic_tokens: int | None
    correction: float | None
    measured_correction: float | None


@dataclass
class Limits:
    """The limits of a request's model; what it has shown narrows what is known.

    `passing_window_tokens` is for this request alone.
    """

    agent: str
    request: LlmRequest
    llm: BaseLlm | None
    strategy: Strategy
    registry: ModelRegistry | None
    state: AgentState
    session: SessionMemory
    passing_window_tokens: int | None = None

    @property
    def model(self) -> str:
        """The name of the model that the request goes to."""
        return self.request.model or (self.llm.model if self.llm else "")

    @property
    def learned(self) -> AgentRecord:
        """What this very model has shown."""
        return self.state.record.of(self.model)

    def window_tokens(self) -> int:
        """The context window that this request has to respect."""
        window = self.known_window_tokens()
        return min(window, self.passing_window_tokens or window)

    def known_window_tokens(self) -> int:
        """The context window, never wider than a provider has said."""
        window = self._resolve_window().tokens
        learned = self.learned.learned_window_tokens or 0
        return min(window, learned) if learned >= MIN_LIMIT_TOKENS else window

    def _resolve_window(self) -> ResolvedWindow:
        return resolve_context_window(
            self.model,
            configured=self.strategy.context_window,
            registry=self.registry,
            agent=self.agent,
        )

    def read_counts(self) -> Counts:
        """What the provider counted last, and what follows from it."""
        real = self.state.read_count("real_tokens")
        last = self.state.read_count("last_heuristic")
        if not (real and last):
            learned = self.learned.learned_correction
            return Counts(real, last, learned, learned)
        correction = correction_factor(real, last)
        ratio = min(real / last, MAX_RATIO)
        return Counts(real, last, correction, max(correction, ratio))

    def reserved_tokens(self) -> int:
        """The output that the request reserves, as far as anybody has said."""
        config, known = self.request.config, self.learned.learned_output_tokens
        named = reserved_output_tokens(self.llm, self.model, config, self.registry)
        return named or known or 0

    def budgets(self) -> Budgets:
        """The sizes that a call has to respect."""
        window, stored = self.window_tokens(), self.state.record.summary
        trigger = self.strategy.trigger_tokens(window)
        budgets = plan_budgets(window, self.reserved_tokens(), trigger)
        # A trigger that leaves less room than the last compaction has left is too low.
        least = min(budgets.full_tokens, 2 * stored.left_tokens if stored else 0)
        due_tokens = max(budgets.threshold_tokens, least)
        return replace(budgets, threshold_tokens=due_tokens)

    def fit_output(self, prompt_tokens: int) -> None:
        """Lowers the reserved output to what is left, where the sum was refused once.

        A tenth stays free: what is known of the prompt is an estimate.
        """
        window = self.window_tokens()
        is_sum = self.learned.learned_output_tokens is not None
        if is_sum and prompt_tokens + self.reserved_tokens() > window:
            self.reserve(int((window - prompt_tokens) * 0.9))

    def reserve(self, output_tokens: int) -> bool:
        """Has the request reserve so much output; False where that is too little."""
        thoughts = thinking_tokens(self.llm, self.request.config)
        if output_tokens < MIN_OUTPUT_TOKENS + thoughts:
            return False
        update = {"max_output_tokens": output_tokens}
        self.request.config = self.request.config.model_copy(update=update)
        return True

    def learn_window(self, overflow: Overflow, estimated_tokens: float) -> None:
        """Remembers the limit that a rejection shows; it never widens the window.

        A limit below what the model has accepted in the session is believed when it is
        named again; until then the rejection counts as one without numbers.
        """
        shown_tokens = int(estimated_tokens * 0.85)
        if overflow.in_bytes or overflow.is_quotation:
            self.passing_window_tokens = max(shown_tokens, MIN_LIMIT_TOKENS)
            return
        learned = overflow.limit_tokens
        accepted = self.session.accepted_tokens(self.model)
        if learned is None or learned < accepted:
            if learned is not None:
                self.session.accepted = self.model, 0
            learned = max(accepted, shown_tokens)
        if learned < self.window_tokens():
            self.state.learn(self.model, window_tokens=learned)
            self._warn_window(overflow, learned, estimated_tokens)

    def _warn_window(
        self, overflow: Overflow, learned_tokens: int, rejected_tokens: float
    ) -> None:
        """Says once for an agent and its model that the window is not as wide."""
        wrong = self._resolve_window()
        said = f"{wrong.tokens:,}, as {_WHO_SAID[wrong.source]}"
        about = f"Agent {self.agent!r}, model {self.model!r}"
        if learned_tokens == overflow.limit_tokens:
            message = "%s: the context window is %s tokens, as the provider says, not "
            message += "%s. Set context_window=%d on the agent's strategy."
            learned = f"{learned_tokens:,}"
            warn_once(logger, message, about, learned, said, learned_tokens)
            return
        message = (
            "%s: the provider rejected a request of about %s tokens as too long, "
            "although the context window is %s. Smaller ones are sent from now on; set "
            "context_window on the agent's strategy to what the model really takes."
        )
        warn_once(logger, message, about, f"{rejected_tokens:,.0f}", said)


def note_count(
    call: CallInFlight,
    state: AgentState,
    real_tokens: int,
    is_truncated: bool | None,
    text_tokens: int,
) -> None:
    """Holds what was learned of a model against what the model has just accepted.

    A server that truncates silently counts no more than its window, whatever is sent:
    far less than was sent (`is_truncated`, None where a count tells nothing), or no
    more than for the call before, which sent less.
    """
    session, model = call.session, call.model
    session.accepted = model, max(real_tokens, session.accepted_tokens(model))
    before = session.counted if session.counted.model == model else Counted()
    grown_tokens = text_tokens - before.text_tokens
    added_tokens = real_tokens - before.real_tokens
    if is_truncated is False and before.real_tokens:
        has_grown = grown_tokens >= _MIN_GROWTH_TOKENS
        is_truncated = has_grown and added_tokens < grown_tokens / 10
    is_behind = bool(is_truncated) and real_tokens >= _MIN_TRUNCATED_TOKENS // 2
    session.counted = Counted(model, real_tokens, text_tokens, is_behind)
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
