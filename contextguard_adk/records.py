"""Records of the guard's work for listeners, log and traces; never message text."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from typing import Any

from google.genai import types

METADATA_KEY = "context_guard"
"""The key in an event's `custom_metadata` that describes a compaction or a recovery."""


@dataclass(frozen=True)
class Usage:
    """The tokens of model calls, as the provider reports them; 0 if it reports none.

    Attributes:
        prompt_tokens: Tokens that were sent, including those that a prompt cache
            served.
        cached_tokens: Tokens that a prompt cache served.
        output_tokens: Tokens that were written, thoughts included.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )


REASONS = {
    "tokens": "the request reached the threshold",
    "turns": "there were too many messages",
    "requested": "a compaction was asked for",
    "overflow": "the provider rejected the request as too long",
}
"""The meaning of each `CompactionRecord.reason`."""


@dataclass(frozen=True)
class Origin:
    """The agent, session and user of a request; every record has these fields.

    Attributes:
        agent: The name of the agent.
        session_id: The id of the session.
        app: The name of the app.
        user: A hash of app and user id; with `user_ids="plain"` the user id.
        invocation_id: ADK's id of the run.
        strategy: The name of the class that guards the agent.
    """

    agent: str
    session_id: str
    _: KW_ONLY
    app: str = ""
    user: str = ""
    invocation_id: str = ""
    strategy: str = ""

    @property
    def place(self) -> str:
        """App, user, session and invocation, for a line of the log.

        Each name is quoted, so that no character in it can break the line.
        """
        return (
            f"app {self.app!r}, user {self.user!r}, session {self.session_id!r}, "
            f"invocation {self.invocation_id!r}"
        )


@dataclass(frozen=True)
class PlannedCompaction(Origin):
    """A compaction that is about to be paid for: the argument of `before_compaction`.

    Attributes:
        reason: `tokens`, `turns` (too many messages), `requested` or `overflow`.
        messages: Copies of the messages that the compaction may leave out, oldest
            first, without those that a summary covers already. The compaction may keep
            some of them.
        tokens: The estimate of the request, in real tokens.
        window_tokens: The context window.
        threshold_tokens: The size of a request from which on a compaction is due.
        summary_tokens: The most tokens that the summary may take.
        is_ahead: Whether the summary is written in the background, so that no model
            call waits for the summary.
    """

    reason: str
    messages: tuple[types.Content, ...]
    tokens: int
    window_tokens: int
    threshold_tokens: int
    summary_tokens: int
    is_ahead: bool = False


@dataclass(frozen=True)
class PlannedSummary(Origin):
    """A summary that is about to be used: the argument of `after_summary`.

    Attributes:
        text: What a model has written, and what stands in the request from now on. The
            texts beside a summary, such as the user's messages, are not part of it.
        messages: Copies of the messages that are left out for it, oldest first, without
            those that an earlier summary covers. The text tells of these as well.
        model: The model that has written the text.
        reason: `tokens`, `turns` (too many messages), `requested` or `overflow`.
        summary_tokens: The most tokens that the text should take.
        is_ahead: Whether the summary is written in the background, so that no model
            call waits for it.
    """

    text: str
    messages: tuple[types.Content, ...]
    model: str
    reason: str
    summary_tokens: int
    is_ahead: bool = False


@dataclass(frozen=True)
class CompactionRecord(Origin):
    """One compaction.

    Attributes:
        reason: `tokens`, `turns` (too many messages), `requested` or `overflow`.
        tokens_before: The estimate of the request before, in real tokens.
        tokens_after: The estimate of the request after, in real tokens.
        contents_before: The number of messages in the request before.
        contents_after: The number of messages in the request after.
        summary_tokens: The heuristic tokens of the summary, four bytes each.
        duration_seconds: How long the strategy took, with all its summaries.
        attempts: How many summaries were written, mechanical ones included.
        is_mechanical: Whether a part of the summary was written without a model.
        model: The model that was asked for summaries, whether or not it wrote one (see
            `failure`); "" if none was asked.
        usage: The tokens of all summary calls, also of those that were of no use.
        cost: The price of all summary calls in US dollars; None if it is unknown.
        waited_seconds: How long the model call was held up by this compaction.
        was_ahead: Whether the summary was written in the background, while the agent
            went on; `duration_seconds` is then the time of the writing.
        failure: Why no model wrote the summary, in one word, such as "refused" if
            `after_summary` has refused it; "" if a model wrote it, or none was needed.
    """

    # In `Origin` this field is a keyword with a default. Here it is required, and may
    # be given by position, as the third argument.
    strategy: str = field()
    reason: str
    tokens_before: int
    tokens_after: int
    contents_before: int
    contents_after: int
    summary_tokens: int
    duration_seconds: float
    attempts: int
    is_mechanical: bool
    model: str
    usage: Usage
    cost: float | None
    waited_seconds: float = 0.0
    was_ahead: bool = False
    failure: str = ""

    @property
    def is_recovery(self) -> bool:
        """Whether the provider had rejected the request as too long."""
        return self.reason == "overflow"

    @property
    def is_without_model(self) -> bool:
        """Whether excerpts were taken because no model wrote a summary: see `failure`.

        Excerpts may stand after the last summary, which a model has written earlier.
        """
        return self.is_mechanical and bool(self.failure)


@dataclass(frozen=True)
class PressureRecord(Origin):
    """A request that still fills much of the window after the guard's work.

    Attributes:
        tokens: The estimate of the request that is sent, in real tokens.
        window_tokens: The context window.
        pressure_before: Estimate / window before any compaction.
        pressure: Estimate / window of the request that is sent.
        warning_threshold: The pressure from which on a request is reported.
    """

    tokens: int
    window_tokens: int
    pressure_before: float
    pressure: float
    warning_threshold: float


@dataclass(frozen=True)
class CallRecord(Origin):
    """One model call that was answered.

    Attributes:
        estimated_tokens: The estimate of the request that was sent, in real tokens.
        real_tokens: The provider's count of the prompt; None if it reported none.
        window_tokens: The context window.
        threshold_tokens: The size of a request from which on a compaction is due.
        pressure: Estimate / window of the request that was sent.
        is_recovered: Whether the provider had rejected a larger request before.
        compaction: The compaction that ran for this call; None if there was none.
        model: The model that was called.
        usage: The tokens of the call; zeros if the provider reported none.
        cost: The price of the call in US dollars; None if it is unknown.
        summary_usage: The tokens of summary calls since the last record of this agent,
            also for compactions that came to nothing.
        summary_cost: The price of these calls in US dollars; None if it is unknown.
    """

    estimated_tokens: int
    real_tokens: int | None
    window_tokens: int
    threshold_tokens: int
    pressure: float
    is_recovered: bool
    compaction: CompactionRecord | None
    model: str
    usage: Usage
    cost: float | None
    summary_usage: Usage
    summary_cost: float | None


def format_cost(dollars: float | None) -> str:
    """Writes an amount of money for people: "unknown", "<$0.0001" or "$1.2346"."""
    if dollars is None:
        return "unknown"
    if 0 < dollars < 0.0001:
        return "<$0.0001"
    return f"${dollars:,.4f}"


def describe_compaction(record: CompactionRecord) -> str:
    """Describes a compaction for people, in one line and without message text.

    - "9,120 → 2,310 tokens, 40 → 12 messages, 1 summary by gpt-5.2, cost $0.0012"
    - "9,120 → 2,310 tokens, 40 → 12 messages, excerpts, no model (gpt-5.2: timeout),
      cost unknown"
    """
    parts = [
        f"{record.tokens_before:,} → {record.tokens_after:,} tokens",
        f"{record.contents_before:,} → {record.contents_after:,} messages",
    ]

    has_new_summary = record.attempts > 0 and record.summary_tokens > 0
    if not has_new_summary:
        parts.append("no new summary")
    elif record.is_without_model:
        parts.append(f"excerpts, no model ({_describe_failure(record)})")
    else:
        parts.append(_describe_summaries(record))

    # A model whose answer was of no use has its price, too.
    if record.model:
        parts.append(f"cost {format_cost(record.cost)}")
    return ", ".join(parts)


def _describe_failure(record: CompactionRecord) -> str:
    """Says which model failed and how: "gpt-5.2: timeout"; or "not asked"."""
    failure = record.failure.replace("_", " ")
    return f"{record.model}: {failure}" if record.model else failure


def _describe_summaries(record: CompactionRecord) -> str:
    """Counts the summaries, and names their model: "2 summaries by gpt-5.2"."""
    count = "1 summary" if record.attempts == 1 else f"{record.attempts} summaries"
    author = f" by {record.model}" if record.model else ""
    rest = ", in part without a model" if record.is_mechanical else ""
    return f"{count}{author}{rest}"


def describe_call(record: CallRecord) -> dict[str, Any]:
    """Describes a call in a small dict of plain values, for `custom_metadata`.

    Returns:
        The description; {} for a call without a compaction and without a recovery.
    """
    compaction = record.compaction
    if compaction is None and not record.is_recovered:
        return {}
    metadata: dict[str, Any] = {
        "estimate": record.estimated_tokens,
        "real": record.real_tokens,
        "window": record.window_tokens,
        "pressure": round(record.pressure, 3),
    }
    if record.is_recovered:
        metadata["recovered"] = True
    if compaction is not None:
        metadata["compaction"] = _describe_fields(compaction)
    return metadata


def _describe_fields(compaction: CompactionRecord) -> dict[str, Any]:
    """Returns fields of a compaction by the names that they have in `custom_metadata`.

    Two kinds of fields are left out:

    - the fields of `Origin`: the event itself tells whose call it is
    - fields that only the log and listeners need, and a `failure` that is ""
    """
    # `strategy` is a field of `Origin` that the event does not tell.
    fields_of_event = {each.name for each in fields(Origin)} - {"strategy"}
    left_out = fields_of_event | {"summary_tokens", "duration_seconds"}
    if not compaction.failure:
        left_out.add("failure")
    short_names = {"attempts": "summaries", "is_mechanical": "mechanical"}

    described = dict[str, Any]()
    for name, value in asdict(compaction).items():
        if name not in left_out:
            described[short_names.get(name, name)] = value
    return described
