"""A strict offline provider: for the tests of this package and for yours."""

from contextguard_adk.testing.clock import VirtualTimeLoop
from contextguard_adk.testing.llm import (
    RecordedRequest,
    Reply,
    Script,
    SimulatedLlm,
    call,
)
from contextguard_adk.testing.provider import (
    ContextOverflowError,
    ErrorStyle,
    InvalidRequestError,
    SimulatedProviderError,
)

__all__ = [
    "ContextOverflowError", "ErrorStyle", "InvalidRequestError", "RecordedRequest",
    "Reply", "Script", "SimulatedLlm", "SimulatedProviderError", "VirtualTimeLoop",
    "call",
]  # fmt: skip
