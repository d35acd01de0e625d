"""Lists the images and files that ADK's model classes and the APIs behind them take.

A place is the message in which a file is sent: the user's, or a tool's result.

The facts were read in ADK 2.0 to 2.13 and in the documentation of the APIs. Types that
only some versions or models of a row take are left out, and so are addresses that may
expire.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from google.genai import types

from contextguard_adk._providers.clients import list_models

Place = Literal["user", "result"]
"""A message of the user, or a tool's result."""


@dataclass(frozen=True)
class Taken:
    """The images and files that a client takes in one place.

    Attributes:
        inline: MIME types of files that are sent as bytes.
        addresses: MIME types of files that are sent as an address, by the beginning of
            the address, such as "gs://".
    """

    inline: frozenset[str] = frozenset()
    addresses: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """The images and files that a client takes in each place."""

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
    # The class sends every file, and Gemini refuses other MIME types. In results only
    # Gemini 3 takes any.
    "Gemini": Row(Taken(_OF_GEMINI)),
    "Gemini on Vertex AI": Row(Taken(_OF_GEMINI, {"gs://": _OF_GEMINI})),
    "Gemma": Row(_SOME_IMAGES),
    # It raises on any other file of the user, and drops it from results.
    "AnthropicLlm": Row(_OF_CLAUDE, _OF_CLAUDE),
    # LiteLlm sends the files of a result as the user's. It decodes text/* itself.
    "LiteLlm": Row(_SOME_IMAGES, _SOME_IMAGES),
    # Any other file would be uploaded with each request.
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
    # It takes texts alone.
    "LiteLlm deepseek": Row(Taken()),
    # It refuses a message of the user after a result, and a file would stand in one.
    "LiteLlm mistral": Row(Taken()),
    # These two leave out the files of a result.
    "OpenAIResponsesLlm": Row(Taken(_IMAGES_AND_GIF | _PDF, {"file-": _PDF})),
    "OpenAILlm": Row(_CHAT_IMAGES),
    # It sends every file as an image.
    "ApigeeLlm chat": Row(_SOME_IMAGES, _SOME_IMAGES),
    # Any other class.
    "": Row(Taken(_IMAGES_AND_GIF | _PDF)),
}
"""By the names that `name_media_clients` returns."""

_LITELLM_WITHOUT_ADDRESSES = (
    "LiteLlm anthropic",
    "LiteLlm vertex_ai",
    "LiteLlm vertex_ai claude",
)
_LITELLM_TYPE_BEGINNINGS = ("text/", "image/", "audio/", "video/")
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
    if blob is not None:
        return bool(blob.data) and blob.mime_type in taken.inline

    file = part.file_data
    if file is None or not file.file_uri:
        return False
    for beginning, mime_types in taken.addresses.items():
        if file.file_uri.startswith(beginning) and file.mime_type in mime_types:
            return True
    return False


def refuses_media(client: str, part: types.Part) -> bool:
    """Returns whether ADK's class is known to raise on a file of the user.

    False does not mean that the file is taken: the API behind the class may refuse it.

    Args:
        client: What `name_media_clients` returned.
        part: One with `inline_data` or `file_data`.
    """
    if client == "AnthropicLlm":
        return _claude_refuses(part)
    if not client.startswith("LiteLlm"):
        return False

    blob = part.inline_data
    if blob and blob.data and blob.mime_type:
        mime_type = _plain(blob.mime_type)
        is_medium = mime_type.startswith(_LITELLM_TYPE_BEGINNINGS)
        return not is_medium and mime_type not in _LITELLM_FILES

    file = part.file_data
    if file and file.file_uri:
        return _refuses_address(client, file.file_uri, _plain(file.mime_type or ""))
    return False


def _claude_refuses(part: types.Part) -> bool:
    """Returns whether ADK's Claude class raises on a file.

    It takes only bytes, of PDF and of some images, and only if their MIME type is in
    lower case.
    """
    blob = part.inline_data
    if blob is None or blob.data is None:
        return True
    mime_type = blob.mime_type or ""
    # "image/png; name=a.png" -> "image/png"
    plain_type = mime_type.partition(";")[0].strip()
    return plain_type not in _OF_CLAUDE.inline


def _refuses_address(client: str, address: str, mime_type: str) -> bool:
    """Returns whether LiteLlm raises on a file that is sent as an address.

    - For some providers it sends no addresses.
    - For OpenAI it sends ids of files, and links to images and videos.
    - For all others it sends any address whose file has a known type.
    """
    if client in _LITELLM_WITHOUT_ADDRESSES:
        return True

    if client == "LiteLlm openai":
        is_id = address.startswith(("file-", "assistant-"))
        is_link = address.startswith(("http://", "https://"))
        is_visual = mime_type.startswith(("image/", "video/"))
        return not is_id and not (is_link and is_visual)

    # This type stands for bytes of which nothing is known.
    return mime_type == "application/octet-stream"


def _plain(mime_type: str) -> str:
    """Returns a MIME type in lower case and without parameters."""
    return mime_type.partition(";")[0].strip().lower()


def name_media_clients(llm: object, model: str) -> tuple[str, ...]:
    """Returns the names of the rows of `ROWS` for a model.

    There is one for each model that a `FallbackModel` may ask, and one for any other
    model.

    Args:
        llm: The model as ADK calls it; None if it is not known.
        model: The name of the model that the request goes to.
    """
    row_names: list[str] = []
    for asked_llm in list_models(llm):
        if asked_llm is llm:
            asked_model = model
        else:  # One of a `FallbackModel`, which has a name of its own.
            asked_model = str(getattr(asked_llm, "model", ""))
        row_names.append(_name_row(asked_llm, asked_model))

    if not row_names:  # A `FallbackModel` without models counts as an unknown class.
        return ("",)
    return tuple(row_names)


def _name_row(llm: object, model: str) -> str:
    """Names the row for a model by its class; "" for a class that has none."""
    class_names = [base.__name__ for base in type(llm).__mro__]
    if "LiteLlm" in class_names:
        return _name_litellm_row(model.lower())

    if "ApigeeLlm" in class_names:
        api_type = getattr(getattr(llm, "_api_type", None), "value", "")
        return "ApigeeLlm chat" if api_type == "chat_completions" else "Gemini"

    # Before "Gemini": ADK's class for Gemma on Google's API derives from both.
    if "GemmaFunctionCallingMixin" in class_names:
        return "Gemma"

    if "Gemini" in class_names:
        is_on_vertex = _uses_vertex() or model.startswith("projects/")
        return "Gemini on Vertex AI" if is_on_vertex else "Gemini"

    for row in ("AnthropicLlm", "OpenAIResponsesLlm", "OpenAILlm"):
        if row in class_names:
            return row
    return ""


def _name_litellm_row(model: str) -> str:
    """Names the row for a model of LiteLlm: by provider and family, else by provider.

    Args:
        model: The name of the model in lower case, such as
            "vertex_ai/claude-opus-4-1" for the row "LiteLlm vertex_ai claude".
    """
    provider = _find_provider(model)
    for family in ("gemini", "claude"):
        family_row = f"LiteLlm {provider} {family}"
        if family in model and family_row in ROWS:
            return family_row

    row = f"LiteLlm {provider}"
    return row if row in ROWS else "LiteLlm"


def _find_provider(model: str) -> str:
    """Finds the provider in the name of a model as ADK does; "" if it names none."""
    provider, slash, _ = model.partition("/")
    if slash:
        return "openai" if provider == "azure" else provider

    # Names without a provider.
    if "azure" in model or model.startswith(("gpt-", "o1")):
        return "openai"
    return ""


def _uses_vertex() -> bool:
    """Returns whether the environment sends Gemini's requests to Vertex AI."""
    for name in ("GOOGLE_GENAI_USE_ENTERPRISE", "GOOGLE_GENAI_USE_VERTEXAI"):
        if os.environ.get(name, "").lower() in ("true", "1"):
            return True
    return False
