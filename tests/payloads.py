"""A provider that refuses large payloads."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from contextguard_adk import Threshold
from contextguard_adk.testing import (
    SimulatedLlm,
    SimulatedProviderError,
)
from tests.builders import (
    Chat,
    queued_tool,
    responses,
)
from tests.chats import guarded_chat, words

CONFIGURED_TOKENS = 128_000


def open_chat(llm: SimulatedLlm, found: str = "", **settings: Any) -> Chat:
    """A chat whose agent searches; the guard is told 128,000 tokens."""
    window = settings.pop("window_tokens", CONFIGURED_TOKENS)
    tools = [queued_tool("search", [found or words(1_500)])]
    agent = {"tools": tools, **settings.pop("agent", {})}
    return guarded_chat(llm, Threshold(context_window=window), agent=agent, **settings)


class Payload(SimulatedLlm):
    """A provider that refuses more than 10,000 bytes of images in messages."""

    refusals: int = 0
    words: str = "Request payload size exceeds the limit: 10000 bytes."

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers, or refuses."""
        parts = [part for each in llm_request.contents for part in each.parts or ()]
        blobs = (part.inline_data for part in parts if part.inline_data)
        if sum(len(blob.data or b"") for blob in blobs) > 10_000:
            self.refusals += 1
            raise SimulatedProviderError(self.words)
        async for response in super().generate_content_async(llm_request, stream):
            yield response


def open_payload(**settings: Any) -> tuple[Chat, Payload]:
    """A chat with that provider, whose window is never reached."""
    llm = Payload(context_window=1_000_000, token_ratio=1.0)
    return open_chat(llm, window_tokens=1_000_000, **settings), llm


def image(number: int, size_bytes: int) -> types.Content:
    """A message with an image."""
    data = bytes([number]) * size_bytes
    blob = types.Blob(mime_type="image/png", data=data, display_name=f"{number}.png")
    return responses(types.Part(text=f"Image {number}."), types.Part(inline_data=blob))
