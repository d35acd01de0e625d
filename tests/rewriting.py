"""Plugins that rewrite what the user said, before the guard or behind it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from tests.chats import hide

SECRET = "zq-77-hidden"

Rewrite = Callable[[LlmRequest], None]


def change_user_texts(change: Callable[[str], str], request: LlmRequest) -> None:
    """Rewrites the first text of every content of the user's side."""
    request.contents = [each.model_copy(deep=True) for each in request.contents]
    for content in request.contents:
        texts = [part for part in content.parts or () if part.text]
        if content.role == "user" and texts:
            texts[0].text = change(texts[0].text or "")


def stamping() -> Rewrite:
    """Puts the time before all messages, another one on each call."""
    seconds = itertools.count(1)

    def stamp(request: LlmRequest) -> None:
        now = f"[2026-01-01 12:{next(seconds):05}]"
        change_user_texts(lambda text: f"{now} {text}", request)

    return stamp


def stamping_parts() -> Rewrite:
    """Adds the time to all messages as a part of its own, another one on each call."""
    seconds = itertools.count(1)

    def stamp(request: LlmRequest) -> None:
        now = types.Part(text=f"It is 12:{next(seconds):05}.")
        request.contents = [each.model_copy(deep=True) for each in request.contents]
        for content in request.contents:
            parts = content.parts or []
            if content.role == "user" and not any(p.function_response for p in parts):
                content.parts = [now, *parts]

    return stamp


def naming() -> Rewrite:
    """Puts the user's name before all messages."""
    return partial(change_user_texts, lambda text: f"Ann says: {text}")


def masking() -> Rewrite:
    """Masks a secret everywhere."""
    return partial(hide, SECRET)


def encoding() -> Rewrite:
    """Replaces every word by another one."""
    return partial(
        change_user_texts, lambda text: " ".join(word[::-1] for word in text.split(" "))
    )
