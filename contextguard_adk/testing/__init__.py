"""A strict offline provider: for the tests of this package and for yours."""

from contextguard_adk.testing.llm import (
    ContextOverflowError,
    ErrorStyle,
    InvalidRequestError,
    RecordedRequest,
    Reply,
    Script,
    SimulatedLlm,
    SimulatedProviderError,
    call,
)

__all__ = [
    "ContextOverflowError",
    "ErrorStyle",
    "InvalidRequestError",
    "RecordedRequest",
    "Reply",
    "Script",
    "SimulatedLlm",
    "SimulatedProviderError",
    "call",
]
