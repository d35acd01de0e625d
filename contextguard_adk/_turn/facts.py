"""What passes between the stages of one model call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.adk.models.base_llm import BaseLlm
from google.genai import types

from contextguard_adk._history.stored import Draft, StoredSummary
from contextguard_adk._history.truncation import Truncation


class Counts(NamedTuple):
    """What the provider counted last; None while it has counted nothing.

    `correction` is capped as documented, `measured_correction` is not.
    """

    real_tokens: int | None = None
    heuristic_tokens: int | None = None
    correction: float | None = None
    measured_correction: float | None = None


class Count(NamedTuple):
    """What a provider has counted of a request, and bytes / 4 of what was sent.

    Attributes:
        real_tokens: What it reported.
        heuristic_tokens: Of all that was sent.
        text_tokens: Of that without images and files.
        is_size: Whether it can be believed to be the size of the request.
    """

    real_tokens: int
    heuristic_tokens: int
    text_tokens: int
    is_size: bool


@dataclass(frozen=True)
class ModelFacts:
    """The model that a request goes to.

    What its provider has shown may make the stated window smaller.

    Attributes:
        reserved_output_tokens: The output limit that somebody has set; 0 for none.
        default_output_tokens: What its client asks for where nobody has; 0 if unknown.
        is_rate: Whether the window follows from a rate limit.
        sum_tokens: What prompt and output may take together by it; 0 for any output.
    """

    name: str
    llm: BaseLlm | None
    known_window_tokens: int
    window_tokens: int
    reserved_output_tokens: int
    default_output_tokens: int = 0
    is_rate: bool = False
    sum_tokens: int = 0
    stated_window_tokens: int = 0
    window_source: str = ""


@dataclass(frozen=True)
class Size:
    """The size of a request.

    Attributes:
        tokens: The estimate, in tokens of the model.
        heuristic_tokens: Its UTF-8 bytes / 4.
        config_tokens: Those of system instruction and tools.
        correction: Tokens of the model per heuristic token; None while unknown.
        uncounted_tokens: By how much `tokens` exceeds what the provider counted last.
    """

    tokens: int = 0
    heuristic_tokens: int = 0
    config_tokens: int = 0
    correction: float | None = None
    uncounted_tokens: int = 0


@dataclass(frozen=True)
class KeptSteps:
    """The newest messages and steps, by index, that a compaction leaves.

    They take `tokens`. The model has not seen the results of `pending` steps. Where the
    results are too large, `truncation` shortens them.
    """

    indexes: frozenset[int] = frozenset()
    pending: frozenset[int] = frozenset()
    tokens: int = 0
    truncation: Truncation | None = None


@dataclass(frozen=True)
class Outcome:
    """A request with a draft in place: its contents, their estimate, what is stored."""

    draft: Draft
    stored: StoredSummary
    contents: Sequence[types.Content]
    tokens: int
