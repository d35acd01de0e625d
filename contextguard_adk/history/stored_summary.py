"""A summary as session state, which is untrusted, keeps it, and its record."""

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

    Its text has a key of its own. The first `model_chars` of it are by a model and
    stand for `model_covered_count` contents. `scope` is where it may be used. The
    continuation quotes `request_chars` (-1 for all) of `request`, a fingerprint in hex.
    Tool results are shortened up to `truncated_upto`, which `HistoryView.name_place`
    has named.
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
    """What the guard keeps of an agent in a scope beside the documented keys.

    `learned_window_tokens` and `learned_correction` come from rejections.
    """

    version: Literal[1] = 1
    learned_window_tokens: int | None = Field(default=None, ge=1, le=2**53)
    learned_correction: float | None = Field(default=None, ge=1, le=100)
    summary: StoredSummary | None = None


@dataclass(frozen=True)
class Unsaved:
    """A summary that was not yet seen in the session, and the record it replaced."""

    summary: StoredSummary
    tokens: int
    replaced: str
