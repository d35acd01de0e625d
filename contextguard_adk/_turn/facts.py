"""The values that pass between the stages of one model call.

A heuristic token is four UTF-8 bytes. A correction is the number of the model's tokens
per heuristic token. An index is the position of a content in the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.adk.models.base_llm import BaseLlm
from google.genai import types

from contextguard_adk._history.stored import Draft, StoredSummary
from contextguard_adk._history.truncation import Truncation


class Counts(NamedTuple):
    """The provider's last count of a request.

    Each field is None while the provider has counted nothing.

    Attributes:
        real_tokens: The count.
        heuristic_tokens: The heuristic tokens of the same request.
        correction: The correction of the model, from 1 to 5.
        measured_correction: The same, from 1 to `MAX_RATIO`.
    """

    real_tokens: int | None = None
    heuristic_tokens: int | None = None
    correction: float | None = None
    measured_correction: float | None = None


class Count(NamedTuple):
    """A provider's count of one request, and the guard's figures for the same request.

    Attributes:
        real_tokens: The count.
        heuristic_tokens: The heuristic tokens of the request.
        text_tokens: The heuristic tokens of the request without images and files.
        is_size: Whether the count is credible as the size of the whole request.
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
        window_tokens: The window for this call. This is `known_window_tokens`, or less
            while the guard recovers from a rejected request.
        reserved_output_tokens: The output limit that the user or the app has set; 0 for
            none.
        default_output_tokens: The output limit of the client itself; 0 if unknown.
        is_rate: Whether the window follows from a rate limit of the provider.
        sum_tokens: The rate limit for prompt and output together; 0 for none.
        stated_window_tokens: The window as configured, or as the registry says.
        window_source: Where the stated window comes from, for messages.
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
        heuristic_tokens: The heuristic tokens of the whole request.
        config_tokens: The heuristic tokens of system instruction and tools.
        correction: The correction of the model; None while unknown.
        error_tokens: How many tokens more than `tokens` the request may take, because
            the estimate may be too low.
    """

    tokens: int = 0
    heuristic_tokens: int = 0
    config_tokens: int = 0
    correction: float | None = None
    error_tokens: float = 0.0


@dataclass(frozen=True)
class KeptSteps:
    """The newest steps, which a compaction leaves word for word.

    A step is a message of the user, or an answer of the model with the results of its
    calls.

    Attributes:
        indexes: The indexes of the messages of these steps: the kept messages.
        pending: The indexes of the last step if the model has not seen its results;
            otherwise empty.
        tokens: The estimate of all kept messages, with shortened results.
        truncation: How the results of kept messages are shortened; None if all results
            stay whole.
    """

    indexes: frozenset[int] = frozenset()
    pending: frozenset[int] = frozenset()
    tokens: int = 0
    truncation: Truncation | None = None


@dataclass(frozen=True)
class Outcome:
    """A request with a summary in place.

    Attributes:
        draft: The summary, as a draft.
        stored: The record of the draft for session state.
        contents: The contents of the request.
        tokens: The estimate of the request, in tokens of the model.
    """

    draft: Draft
    stored: StoredSummary
    contents: Sequence[types.Content]
    tokens: int
