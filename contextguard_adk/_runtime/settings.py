"""The settings of a guard, which hold for all its agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from contextguard_adk._providers.costs import Costs
from contextguard_adk._support.settings import (
    PositiveCount,
    Ratio,
    Seconds,
    Settings,
    Summaries,
)

StateKeys = Literal["auto", "plain", "namespaced"]
Dollars = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]


class SummaryBudget(Settings):
    """The most that summaries may cost; beyond it they are excerpts, without a model.

    At least one of the four limits has to be given. A summary that is under way when a
    limit is reached is still paid for, so that the cost may exceed the limit by the
    summaries that are written at once.
    """

    dollars_per_session: Dollars | None = Field(
        default=None,
        description="US dollars for the summaries of one session in a period, more "
        "than 0. None: no such limit.",
    )
    tokens_per_session: PositiveCount | None = Field(
        default=None,
        description="Tokens that summaries of one session read and write in a period, "
        "at least 1. None: no such limit.",
    )
    dollars_per_process: Dollars | None = Field(
        default=None,
        description="US dollars for all summaries of this process in a period, more "
        "than 0. None: no such limit.",
    )
    tokens_per_process: PositiveCount | None = Field(
        default=None,
        description="Tokens that all summaries of this process read and write in a "
        "period, at least 1. None: no such limit.",
    )
    period_hours: Annotated[float, Field(ge=0.1, le=8_760, strict=True)] = Field(
        default=24.0,
        description="The hours of a period, at least 0.1 and at most 8,760. A period "
        "begins with the first summary that is paid for after the last period.",
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if not self.limits_session and not self.limits_process:
            raise ValueError(
                "give at least one of dollars_per_session, tokens_per_session, "
                "dollars_per_process, tokens_per_process"
            )
        return self

    @property
    def limits_session(self) -> bool:
        """Whether there is a limit for each session."""
        return bool(self.dollars_per_session or self.tokens_per_session)

    @property
    def limits_process(self) -> bool:
        """Whether there is a limit for the process."""
        return bool(self.dollars_per_process or self.tokens_per_process)

    @property
    def is_in_dollars(self) -> bool:
        """Whether there is a limit in dollars, which needs the prices of models."""
        return bool(self.dollars_per_session or self.dollars_per_process)


class GuardSettings(Settings):
    """The settings of a guard that hold for all its agents.

    A subclass, `PluginSettings`, adds the strategy of each agent.
    """

    observe: bool = Field(
        default=False,
        description="True measures and reports, but changes no request and stores no "
        "summary.",
    )
    summaries: Summaries = Field(
        default="write",
        description='"stored" stops paying: a stored summary stays, no new one is '
        "asked for, and what does not fit is cut to excerpts without a model. Here it "
        'holds for all agents and sessions. "write": the strategy of each agent '
        "decides, and session state (`context_guard:summaries`).",
    )
    summary_budget: SummaryBudget | None = Field(
        default=None,
        description="The most that summaries may cost (`SummaryBudget`), for each "
        "session or for the process, in dollars or tokens and a period. Beyond it, "
        "stored summaries stay and new ones are excerpts, as with "
        '`summaries="stored"`. None: no limit.',
    )
    state_keys: StateKeys = Field(
        default="auto",
        description='The form of the session-state keys that are written. "plain": '
        '`__context_guard_summary_{agent}`; "namespaced": '
        '`context_guard:summary:{agent}`; "auto": namespaced where anything in the app '
        "declares a `state_schema`, else plain.",
    )
    warning_threshold: Ratio = Field(
        default=0.70,
        description="A request that is still above this part of the context window "
        "after compaction is reported as under pressure; more than 0 and at most 1.",
    )
    prices: Mapping[str, Costs] = Field(
        default_factory=dict,
        description="What models cost (`Costs`), by the model name that the agent's "
        "request carries. They go before the prices of the model registry.",
    )
    max_background_summaries: PositiveCount = Field(
        default=4,
        description="How many summaries are written ahead of time (see `ahead`) at "
        "once, at least 1; others wait for their turn.",
    )
    summary_artifacts: bool = Field(
        default=False,
        description="True saves the summary of each compaction as a version of the "
        "artifact `compaction-{agent}.md`, for people to read, where the app has an "
        "artifact service and no agent with ADK's tool `load_artifacts`, which would "
        "list it for the model. ADK does not delete them with the session: see "
        "`contextguard_adk.sessions.purge`.",
    )
    usage_in_state: bool = Field(
        default=True,
        description="True keeps one line about how full the window is in session state "
        "(`context_guard:usage:{agent}`), for people; `adk web` shows it.",
    )
    recent_events: bool = Field(
        default=False,
        description="True has session state say since when events are needed, so that "
        "long sessions can be loaded in part (`load_recent`).",
    )
    user_ids: Literal["hashed", "plain"] = Field(
        default="hashed",
        description='How records, traces and the log name a user: "hashed" or "plain".',
    )
    listener_timeout_seconds: Seconds = Field(
        default=5.0,
        description="How long a model call waits for a listener, more than 0 and at "
        "most 3,600. One that is late goes on, and is not called again before it ends.",
    )
