"""What the guard keeps of an agent in session state, as JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic import PlainSerializer as Write
from pydantic import PlainValidator as Read

from contextguard_adk._history.fingerprints import (
    Covered,
    decode_covered,
    encode_covered,
)
from contextguard_adk._history.truncation import Truncation

MIN_WINDOW_TOKENS = 1_000
"""Smaller windows are not learned."""

MAX_MODELS = 8
"""Of one agent, whose limits are remembered; the newest stay."""

MAX_RECORD_BYTES = 16 * 1024
"""The most that a record takes as JSON, whatever the length of the session."""


def _read_covered(value: object) -> Covered:
    return value if isinstance(value, Covered) else decode_covered(str(value))


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)


class StoredSummary(_Stored):
    """A summary, and what it replaces.

    Its text has a key of its own in session state. A model wrote the first
    `model_chars` of it, which replace the first `model_covered_count` contents.
    `beside` holds what each section keeps, by its name. `scope` is where the summary
    may be used. The continuation gives the `reason` and quotes `request_chars` (-1 for
    all) of `request`, a fingerprint in hex. Tool results are shortened up to
    `truncated_upto`, which `History.name_place` has named. A compacted request took
    `left_tokens`.
    """

    text: str = Field(default="", exclude=True)
    covered: Annotated[Covered, Read(_read_covered), Write(encode_covered)] = Covered()
    beside: dict[str, JsonValue] = Field(default={})
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

    @property
    def room_bytes(self) -> int:
        """How many bytes the record can still take."""
        return max(0, MAX_RECORD_BYTES - 200 - len(self.model_dump_json().encode()))


class Learned(_Stored):
    """What a model has shown.

    The provider named the window in a rejection; where it `is_guess`, its counts only
    suggest it. `output_tokens` is set where it refused a sum of input and output.
    """

    window_tokens: int | None = Field(default=None, ge=MIN_WINDOW_TOKENS, le=2**53)
    is_guess: bool = False
    output_tokens: int | None = Field(default=None, ge=1, le=2**53)
    correction: float | None = Field(default=None, ge=1, le=100)


_NOTHING_LEARNED = Learned()


class AgentRecord(_Stored):
    """What the guard keeps of an agent in a scope, and what its models have shown.

    `has_recall` tells that the agent's requests declare the recall tool; `helped`
    is what helped where the provider refused the form of a history.
    """

    version: Literal[2] = 2
    learned: dict[Annotated[str, Field(max_length=256)], Learned] = Field(
        default={}, max_length=MAX_MODELS
    )
    summary: StoredSummary | None = None
    has_recall: bool | None = None
    helped: dict[str, Annotated[str, Field(max_length=256)]] | None = Field(
        default=None, max_length=16
    )

    def of(self, model: str) -> Learned:
        """Returns what a model has shown."""
        return self.learned.get(model, _NOTHING_LEARNED)
