"""A summary as session state keeps it, and the record that it stands in.

Session state is untrusted: everything is validated when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

from contextguard_adk.history.coverage import Covered, decode_covered, encode_covered
from contextguard_adk.history.truncation import Truncation

MAX_RECORD_BYTES = 16 * 1024
"""What a record takes at most, as JSON, whatever the length of the session."""


def _read_covered(value: object) -> Covered:
    return value if isinstance(value, Covered) else decode_covered(str(value))


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)


class StoredSummary(_Stored):
    """A summary, what it stands for, and what the guard keeps beside it.

    Attributes:
        text: What a model, or the mechanical fallback, wrote; it has a key of its own.
        ledger: Excerpts of the user's messages that it covers.
        todos: The todo list as it stood, written by the guard.
        index: Which items were left out, written by the guard.
        scope: Session, branch and isolation scope; it is used nowhere else.
        invocation: The invocation in which the compaction ran.
        request: Hex fingerprint of the live request that the continuation quotes; "".
        request_chars: How many characters of it are quoted; -1 is all of it.
        model_chars: Length of the leading part that a model wrote.
        model_covered_count: How many covered contents that part stands for.
        truncated_upto: The newest content whose tool results are shortened, as
            `HistoryView.name_place` names it.
        has_recall: Whether the agent is told handles of what is left out.
    """

    text: str = Field(default="", exclude=True)
    covered: Annotated[
        Covered, PlainValidator(_read_covered), PlainSerializer(encode_covered)
    ] = Covered()
    ledger: tuple[str, ...] = Field(default=(), strict=False)
    todos: str = ""
    index: str = ""
    scope: str = ""
    invocation: str = ""
    request: str = ""
    request_chars: int = -1
    has_continuation: bool = True
    model_chars: int = 0
    model_covered_count: int = 0
    truncation: Truncation | None = None
    truncated_upto: str = ""
    has_recall: bool = False

    @property
    def is_mechanical(self) -> bool:
        """Whether a part of it was written without a model."""
        return self.model_covered_count < self.covered.content_count

    @property
    def model_text(self) -> str:
        """The part of it that a model wrote."""
        return self.text[: self.model_chars]


class AgentRecord(_Stored):
    """All that the guard keeps of one agent in one scope beside the documented keys.

    `learned_window_tokens` is a limit that a provider has named, `learned_correction`
    real tokens per heuristic token, as a rejection has shown. A record of another
    version is ignored.
    """

    version: Literal[1] = 1
    learned_window_tokens: int | None = Field(default=None, ge=1, le=2**53)
    learned_correction: float | None = Field(default=None, ge=1, le=100)
    summary: StoredSummary | None = None


@dataclass(frozen=True)
class Unsaved:
    """A summary that was written, but not yet seen in the session.

    `tokens` is the estimate before the compaction, `replaced` the record that stood
    there when the call began.
    """

    summary: StoredSummary
    tokens: int
    replaced: str
