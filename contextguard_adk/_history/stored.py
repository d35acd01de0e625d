"""The summaries of an agent in the form in which they are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic import PlainSerializer as Write
from pydantic import PlainValidator as Read

from contextguard_adk._history.coverage import Covered, decode_covered, encode_covered
from contextguard_adk._history.truncation import Truncation

MAX_RECORD_BYTES = 16 * 1024
"""What a record takes at most, as JSON, whatever the length of the session."""


def _read_covered(value: object) -> Covered:
    return value if isinstance(value, Covered) else decode_covered(str(value))


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)


class StoredSummary(_Stored):
    """A summary, what it stands for, and what the guard keeps beside it.

    Its text has a key of its own. The first `model_chars` of it are by a model and
    stand for `model_covered_count` contents. `done` lists calls of the turn that it was
    made in. `scope` is where it may be used. The continuation says the `reason`, and
    quotes `request_chars` (-1 for all) of `request`, a fingerprint in hex. Tool results
    are shortened up to `truncated_upto`, which `HistoryView.name_place` has named.
    """

    text: str = Field(default="", exclude=True)
    covered: Annotated[Covered, Read(_read_covered), Write(encode_covered)] = Covered()
    ledger: tuple[str, ...] = Field(default=(), strict=False)
    todos: str = ""
    done: str = ""
    index: str = ""
    scope: str = ""
    invocation: str = ""
    reason: str = ""
    request: str = ""
    request_chars: int = -1
    has_continuation: bool = True
    model_chars: int = 0
    model_covered_count: int = 0
    truncation: Truncation | None = None
    truncated_upto: str = ""
    has_recall: bool = False
    left_tokens: int = Field(default=0, ge=0, le=2**53)

    @property
    def is_mechanical(self) -> bool:
        """Whether a part of it was written without a model."""
        return self.model_covered_count < self.covered.content_count

    @property
    def model_text(self) -> str:
        """The part of it that a model wrote."""
        return self.text[: self.model_chars]


@dataclass(frozen=True, slots=True)
class AheadSummary:
    """A summary that was written before it was needed; small, for it may wait long.

    `facts` are fields of its `CompactionRecord`: what it took.
    """

    text: str
    covered: Covered
    invocation_id: str
    facts: Mapping[str, Any]

    @property
    def stored(self) -> StoredSummary:
        """It as what stands in place of history, to find out what that is now."""
        return StoredSummary(
            text=self.text,
            covered=self.covered,
            invocation=self.invocation_id,
            model_covered_count=self.covered.content_count,
        )


class AgentRecord(_Stored):
    """What the guard keeps of an agent in a scope, and what one model has shown it.

    A provider that names `learned_output_tokens` has refused a sum of input and output.
    `has_recall` says that the agent's requests declare the recall tool; `helped`
    is what helped where the provider refused a history.
    """

    version: Literal[1] = 1
    learned_model: str | None = None
    learned_window_tokens: int | None = Field(default=None, ge=1, le=2**53)
    learned_output_tokens: int | None = Field(default=None, ge=1, le=2**53)
    learned_correction: float | None = Field(default=None, ge=1, le=100)
    summary: StoredSummary | None = None
    has_recall: bool | None = None
    helped: dict[str, Annotated[str, Field(max_length=256)]] | None = Field(
        default=None, max_length=16
    )

    def of(self, model: str) -> AgentRecord:
        """The record itself, or an empty one where another model was learned of."""
        return self if self.learned_model == model else AgentRecord()
