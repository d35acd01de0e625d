"""Which images and files ADK's model classes take, and the APIs behind them."""

# Read in ADK 2.0 to 2.13 and in the documentation of the APIs. What only some versions
# or models of a row take is left out, and so are addresses that may expire.

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from google.genai import types

from contextguard_adk._providers.clients import class_names, list_models

Place = Literal["user", "result"]
"""A message of the user, or a tool's result."""


@dataclass(frozen=True)
class Taken:
    """What may stand in one place.

    Attributes:
        inline: MIME types of bytes.
        addresses: MIME types by the beginning of the address.
    """

    inline: frozenset[str] = frozenset()
    addresses: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """What one client takes in each place."""

    user: Taken
    result: Taken = field(default_factory=Taken)


_PDF = frozenset({"application/pdf"})
_IMAGES = frozenset({"image/png", "image/jpeg", "image/webp"})
_IMAGES_AND_GIF = _IMAGES | {"image/gif"}
_AUDIO = frozenset(
    {"audio/wav", "audio/mp3", "audio/mpeg", "audio/ogg", "audio/flac", "audio/aac"}
)
_VIDEO = frozenset(
    {"video/mp4", "video/mpeg", "video/mpg", "video/mov", "video/webm", "video/3gpp"}
)
_OF_GEMINI = _IMAGES | {"image/heic", "image/heif"} | _AUDIO | _VIDEO | _PDF
_OF_CLAUDE = Taken(_IMAGES_AND_GIF | _PDF)

_SOME_IMAGES = Taken(_IMAGES)
_CHAT_IMAGES = Taken(_IMAGES_AND_GIF)
_LITELLM_GEMINI = Taken(_IMAGES | _AUDIO | _PDF)

ROWS: Mapping[str, Row] = {
    # The class sends whatever it is given, Gemini refuses other MIME types. In results
    # only Gemini 3 takes any.
    "Gemini": Row(Taken(_OF_GEMINI)),
    "Gemini on Vertex AI": Row(Taken(_OF_GEMINI, {"gs://": _OF_GEMINI})),
    "Gemma": Row(_SOME_IMAGES),
    # It raises on all else that the user sends, and drops it from results.
    "AnthropicLlm": Row(_OF_CLAUDE, _OF_CLAUDE),
    # LiteLlm sends what a result holds as the user's; it decodes text/* itself.
    "LiteLlm": Row(_SOME_IMAGES, _SOME_IMAGES),
    # Another file would be uploaded with each request.
    "LiteLlm openai": Row(Taken(_IMAGES_AND_GIF, {"file-": _PDF}), _CHAT_IMAGES),
    "LiteLlm anthropic": Row(_OF_CLAUDE, _OF_CLAUDE),
    "LiteLlm vertex_ai": Row(_SOME_IMAGES, _SOME_IMAGES),
    "LiteLlm vertex_ai claude": Row(_OF_CLAUDE, _OF_CLAUDE),
    "LiteLlm bedrock claude": Row(_OF_CLAUDE, _OF_CLAUDE),
    # LiteLLM leaves out videos without a word.
    "LiteLlm gemini": Row(_LITELLM_GEMINI, _LITELLM_GEMINI),
    "LiteLlm vertex_ai gemini": Row(
        Taken(_LITELLM_GEMINI.inline, {"gs://": _OF_GEMINI}), _LITELLM_GEMINI
    ),
    # It reads texts alone.
    "LiteLlm deepseek": Row(Taken()),
    # It refuses a message of the user behind a result, where a file would stand.
    "LiteLlm mistral": Row(Taken()),
    # They leave out what a result holds.
    "OpenAIResponsesLlm": Row(Taken(_IMAGES_AND_GIF | _PDF, {"file-": _PDF})),
    "OpenAILlm": Row(_CHAT_IMAGES),
    # It spells every file as an image.
    "ApigeeLlm chat": Row(_SOME_IMAGES, _SOME_IMAGES),
    # A class of the app's own.
    "": Row(Taken(_IMAGES_AND_GIF | _PDF)),
}
"""By what `name_media_clients` returns."""

_LITELLM_KINDS = ("text/", "image/", "audio/", "video/")
_LITELLM_FILES = _PDF | {
    "application/msword",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation",
    "application/json",
    "application/x-sh",
}


def takes_media(client: str, place: Place, part: types.Part) -> bool:
    """Returns whether a client is known to take an image or a file in a place.

    Args:
        client: What `name_media_clients` returned.
        place: Where the part would stand.
        part: One with `inline_data` or `file_data`.
    """
    row = ROWS[client]
    taken = row.user if place == "user" else row.result
    blob = part.inline_data
    file = part.file_data
    if blob is not None:
        return bool(blob.data) and blob.mime_type in taken.inline

    if file is None or not file.file_uri:
        return False
    for beginning, kinds in taken.addresses.items():
        if file.file_uri.startswith(beginning) and file.mime_type in kinds:
            return True
    return False


def refuses_media(client: str, part: types.Part) -> bool:
    """Returns whether the class itself is known to raise on what the user has sent.

    What is neither taken nor refused depends on the API.
    """
    if client == "AnthropicLlm":
        return _claude_refuses(part)
    if not client.startswith("LiteLlm"):
        return False

    blob = part.inline_data
    file = part.file_data
    if blob and blob.data and blob.mime_type:
        kind = _plain(blob.mime_type)
        return not (kind.startswith(_LITELLM_KINDS) or kind in _LITELLM_FILES)
    if file and file.file_uri:
        return _refuses_address(client, file.file_uri, _plain(file.mime_type or ""))
    return False


def _claude_refuses(part: types.Part) -> bool:
    """Whether ADK's Claude class raises: on all but some images and PDF, in bytes."""
    blob = part.inline_data
    if blob is None or blob.data is None:
        return True
    kind = (blob.mime_type or "").partition(";")[0].strip()
    return kind not in _OF_CLAUDE.inline


def _refuses_address(client: str, address: str, kind: str) -> bool:
    """Whether LiteLlm raises on a file that it would have to name by its address."""
    if client in ("LiteLlm anthropic", "LiteLlm vertex_ai", "LiteLlm vertex_ai claude"):
        return True
    if client == "LiteLlm openai":
        is_id = address.startswith(("file-", "assistant-"))
        is_link = address.startswith(("http://", "https://"))
        is_shown = is_link and kind.startswith(("image/", "video/"))
        return not (is_id or is_shown)
    return kind == "application/octet-stream"


def _plain(mime_type: str) -> str:
    """A MIME type in lower case and without parameters."""
    return mime_type.partition(";")[0].strip().lower()


def name_media_clients(llm: object, model: str) -> tuple[str, ...]:
    """Names the rows for a model: one, or one for each model of a `FallbackModel`.

    Args:
        llm: The model as ADK calls it; None where it is not known.
        model: The name that the request goes to.
    """
    names: list[str] = []
    for each in list_models(llm):
        name = model if each is llm else str(getattr(each, "model", ""))
        names.append(_name_row(each, name))
    return tuple(names) or ("",)


def _name_row(llm: object, model: str) -> str:
    names = class_names(llm)
    if "LiteLlm" in names:
        return _name_litellm_row(model.lower())
    if "ApigeeLlm" in names:
        kind = getattr(getattr(llm, "_api_type", None), "value", "")
        return "ApigeeLlm chat" if kind == "chat_completions" else "Gemini"
    if "GemmaFunctionCallingMixin" in names:
        return "Gemma"
    if "Gemini" in names:
        is_on_vertex = _uses_vertex() or model.startswith("projects/")
        return "Gemini on Vertex AI" if is_on_vertex else "Gemini"
    known = ("AnthropicLlm", "OpenAIResponsesLlm", "OpenAILlm")
    return next((name for name in known if name in names), "")


def _name_litellm_row(model: str) -> str:
    """The row of a provider, found in the name of a model as ADK finds it."""
    provider, slash, _ = model.partition("/")
    if not slash:
        provider = ""
        if "azure" in model or model.startswith(("gpt-", "o1")):
            provider = "openai"
    if provider == "azure":
        provider = "openai"

    for family in ("gemini", "claude"):
        row = f"LiteLlm {provider} {family}"
        if family in model and row in ROWS:
            return row
    row = f"LiteLlm {provider}"
    return row if row in ROWS else "LiteLlm"


def _uses_vertex() -> bool:
    """Whether the environment sends Gemini's requests to Vertex AI."""
    names = ("GOOGLE_GENAI_USE_ENTERPRISE", "GOOGLE_GENAI_USE_VERTEXAI")
    return any(os.environ.get(name, "").lower() in ("true", "1") for name in names)
