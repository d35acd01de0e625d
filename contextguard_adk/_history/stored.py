"""What the guard keeps of an agent in session state, as JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic import PlainSerializer as Write
from pydantic import PlainValidator as Read

from contextguard_adk._history.fingerprints import (
    FINGERPRINT_BYTES,
    RECENT_COUNT,
    Covered,
    decode_covered,
    encode_covered,
)
from contextguard_adk._history.truncation import Length, Truncation

VERSION = 2  # Of the record that is written; older ones are ignored.
MAX_MODELS = 8
"""Of one agent, whose limits are remembered; the newest stay."""

MAX_RECORD_BYTES = 16 * 1024
"""The most that a record takes as JSON, however long the session is.

Sections that have room of their own are not counted.
"""

MAX_SUMMARY_CHARS = 256 * 1024
"""Summaries of ours take 20,000 tokens at most; longer ones of others are cut."""

MAX_TODOS = 1_000


V = TypeVar("V")


def with_newest(known: Mapping[str, V], model: str, value: V) -> dict[str, V]:
    """Returns the values of the newest `MAX_MODELS` models; the given one stands last.

    Args:
        known: The values by the model's name, the oldest first.
        model: The name of the model that was seen last.
        value: Its value, which replaces an older one.
    """
    others = {name: each for name, each in known.items() if name != model}
    ordered = {**others, model: value}
    return dict(list(ordered.items())[-MAX_MODELS:])


def _read_covered(value: object) -> Covered:
    return value if isinstance(value, Covered) else decode_covered(str(value))


# What only a later release knows stays where a record is written again.
class _Stored(BaseModel, extra="allow"):
    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)


class StoredSummary(_Stored):
    """A summary, and what it replaces.

    Its text has a key of its own in session state. A model wrote the first
    `model_chars` of it, which replace the first `model_covered_count` contents.
    `beside` holds what each section keeps, by its name. `scope` is where the summary
    may be used; `last_event` is the newest that is covered. The continuation gives the
    `reason` and quotes `request_chars` (-1 for all) of `request`, a fingerprint in hex.
    Tool results are shortened up to `truncated_upto`, which `History.name_place` has
    named. A compacted request took `left_tokens`. With `has_older` all is covered that
    stands before what is known of `covered`. `edits` is that of the record then.
    """

    text: str = Field(default="", exclude=True)
    covered: Annotated[Covered, Read(_read_covered), Write(encode_covered)] = Covered()
    beside: dict[str, JsonValue] = Field(default={})
    scope: str = ""
    invocation: str = ""
    last_event: str = ""
    reason: str = ""
    request: str = ""
    request_chars: int = Field(default=-1, ge=-1, le=2**53)
    has_continuation: bool = True
    model_chars: Length = 0
    model_covered_count: Length = 0
    truncation: Truncation | None = None
    truncated_upto: str = ""
    has_recall: bool = False
    has_older: bool = False
    left_tokens: Length = 0
    edits: Length = 0

    @property
    def model_text(self) -> str:
        return self.text[: self.model_chars]

    def room_bytes(self, uncounted: Collection[str]) -> int:
        """Returns how many bytes of JSON the record can still take.

        Args:
            uncounted: Names in `beside` whose values always have a place.
        """
        counted = self.model_dump_json(exclude={"beside": {*uncounted}})
        # The same where little is loaded, and so fewer fingerprints are at hand.
        missing = RECENT_COUNT - len(self.covered.recent)
        taken_bytes = len(counted.encode()) + missing * FINGERPRINT_BYTES * 4 // 3
        return max(0, MAX_RECORD_BYTES - 200 - taken_bytes)


class Learned(_Stored):
    """What a model has shown.

    The provider named the window in a rejection. `output_tokens` is set where it
    refused a sum of input and output. `correction` is set where it reports no usage.
    `is_used` tells of a compaction in a process that has not seen the provider say so.
    """

    window_tokens: int | None = Field(default=None, ge=1, le=2**53)
    output_tokens: int | None = Field(default=None, ge=1, le=2**53)
    correction: float | None = Field(default=None, ge=1, le=20)
    is_used: bool = False


class AgentRecord(_Stored):
    """What the guard keeps of an agent in a scope, and what its models have shown.

    `has_recall` tells that the agent's requests declare the recall tool; `helped`
    is what helped where the provider refused the form of a history; `edits` counts the
    changes by hand. As JSON every version begins with `{"version":`.
    """

    version: int = Field(default=VERSION, ge=VERSION, le=2**53)
    learned: dict[Annotated[str, Field(max_length=256)], Learned] = Field(
        default={}, max_length=MAX_MODELS
    )
    summary: StoredSummary | None = None
    has_recall: bool | None = None
    helped: dict[str, Annotated[str, Field(max_length=256)]] | None = Field(
        default=None, max_length=16
    )
    edits: Length = 0

    @property
    def is_newer(self) -> bool:
        """Whether a later release has written it: it is read and left as it is."""
        return self.version > VERSION

    def of(self, model: str) -> Learned:
        return self.learned.get(model) or Learned()


class StateValues(_Stored):
    """What stands under the keys of an agent; no more of it is ever read."""

    summary: str = Field(default="", max_length=MAX_SUMMARY_CHARS)
    # With sections that have room of their own, and the texts of what helped.
    record: str = Field(default="{}", max_length=3 * MAX_RECORD_BYTES)
    summarized_at: float = Field(default=1, ge=1, le=2**53)
    real_tokens: float = Field(default=1, ge=1, le=2**53)
    last_heuristic: float = Field(default=1, ge=1, le=2**53)
    scopes: list[Annotated[str, Field(max_length=64)]] = Field([], max_length=1_024)
    todos: list[Any] = Field([], max_length=MAX_TODOS)
