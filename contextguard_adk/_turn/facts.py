"""The values that pass between the stages of one model call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.adk.models.base_llm import BaseLlm
from google.genai import types

from contextguard_adk._history.stored import Draft, StoredSummary
from contextguard_adk._history.truncation import Truncation


class Counts(NamedTuple):
    """The provider's last count of a request; None while it has counted nothing.

    Attributes:
        real_tokens: The count.
        heuristic_tokens: The UTF-8 bytes / 4 of the same request.
        correction: Real tokens per heuristic token, from 1 to 5.
        measured_correction: Real tokens per heuristic token, from 1 to `MAX_RATIO`.
    """

    real_tokens: int | None = None
    heuristic_tokens: int | None = None
    correction: float | None = None
    measured_correction: float | None = None


class Count(NamedTuple):
    """A provider's count of one request, and the guard's figures for the same request.

    Attributes:
        real_tokens: The count.
        heuristic_tokens: The UTF-8 bytes / 4 of the request.
        text_tokens: The UTF-8 bytes / 4 of the request without images and files.
        is_size: Whether the count is credible as the size of the request.
    """

    real_tokens: int
    heuristic_tokens: int
    text_tokens: int
    is_size: bool


@dataclass(frozen=True)
class ModelFacts:
    """The model that a request goes to.

    Attributes:
        name: The name of the model.
        llm: The client that is called; None if it is unknown.
        known_window_tokens: The stated window, or a smaller limit that the provider has
            shown.
        window_tokens: The window for this call; a recovery tries smaller ones.
        reserved_output_tokens: The output limit that somebody has set; 0 for none.
        default_output_tokens: The output limit of the client itself; 0 if unknown.
        is_rate: Whether the window follows from a rate limit of the provider.
        sum_tokens: The limit of that rate for prompt and output together; 0 for none.
        stated_window_tokens: The window as configured, or as the registry says.
        window_source: Where the stated window comes from.
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
        heuristic_tokens: The UTF-8 bytes / 4.
        config_tokens: The UTF-8 bytes / 4 of system instruction and tools.
        correction: Tokens of the model per heuristic token; None while unknown.
        error_tokens: How much more than `tokens` the request may take.
    """

    tokens: int = 0
    heuristic_tokens: int = 0
    config_tokens: int = 0
    correction: float | None = None
    error_tokens: float = 0.0


@dataclass(frozen=True)
class KeptSteps:
    """The newest messages and steps, which a compaction leaves.

    Attributes:
        indexes: The indexes of all kept messages in the request.
        pending: The indexes of the step whose results the model has not seen; empty if
            it has seen all.
        tokens: The size of all kept messages, after their results are shortened.
        truncation: How results that are too large are shortened; None if none is.
    """

    indexes: frozenset[int] = frozenset()
    pending: frozenset[int] = frozenset()
    tokens: int = 0
    truncation: Truncation | None = None


@dataclass(frozen=True)
class Outcome:
    """A request with a draft in place.

    Attributes:
        draft: The draft.
        stored: The record of it for session state.
        contents: The contents of the request.
        tokens: The estimate of the request, in tokens of the model.
    """

    draft: Draft
    stored: StoredSummary
    contents: Sequence[types.Content]
    tokens: int
