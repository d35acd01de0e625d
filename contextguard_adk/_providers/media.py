"""Lists the images and files that ADK's model classes and the APIs behind them take.

A medium is an image or another file in a part of a message. It is sent as bytes
(`inline_data`) or as an address (`file_data`).

The facts were read in ADK 2.0 to 2.13 and in the documentation of the APIs. A row of
the table lists what a client takes. A row leaves out the types that only some versions
or models of the client take, and addresses that may expire.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from google.genai import types

from contextguard_adk._providers.clients import list_models

Place = Literal["user", "result"]
"""Where a medium is sent: in a message of the user, or in the result of a tool."""


@dataclass(frozen=True)
class Taken:
    """The images and files that a client takes in one place.

    Attributes:
        inline: The MIME types that the client takes as bytes.
        addresses: The MIME types that the client takes as an address, by the beginning
            of the address, such as "gs://".
    """

    inline: frozenset[str] = frozenset()
    addresses: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """The images and files that a client takes in each `Place`."""

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
    # The class sends every file, and Gemini refuses files of other MIME types. In
    # results only Gemini 3 takes files.
    "Gemini": Row(Taken(_OF_GEMINI)),
    "Gemini on Vertex AI": Row(Taken(_OF_GEMINI, {"gs://": _OF_GEMINI})),
    "Gemma": Row(_SOME_IMAGES),
    # The class raises on any other file of the user. It drops other files from results.
    "AnthropicLlm": Row(_OF_CLAUDE, _OF_CLAUDE),
    # LiteLlm sends the files of a result in a message of the user. It sends a file of
    # type text/* as text.
    "LiteLlm": Row(_SOME_IMAGES, _SOME_IMAGES),
    # LiteLlm would upload any other file again with each request.
    "LiteLlm openai": Row(Taken(_IMAGES_AND_GIF, {"file-": _PDF}), _CHAT_IMAGES),
    "LiteLlm anthropic": Row(_OF_CLAUDE, _OF_CLAUDE),
    "LiteLlm vertex_ai": Row(_SOME_IMAGES, _SOME_IMAGES),
    "LiteLlm vertex_ai claude": Row(_OF_CLAUDE, _OF_CLAUDE),
    "LiteLlm bedrock claude": Row(_OF_CLAUDE, _OF_CLAUDE),
    # LiteLLM leaves out videos, and says nothing.
    "LiteLlm gemini": Row(_LITELLM_GEMINI, _LITELLM_GEMINI),
    "LiteLlm vertex_ai gemini": Row(
        Taken(_LITELLM_GEMINI.inline, {"gs://": _OF_GEMINI}), _LITELLM_GEMINI
    ),
    # DeepSeek takes texts alone.
    "LiteLlm deepseek": Row(Taken()),
    # LiteLlm would put a file of a result in a message of the user. Mistral refuses
    # such a message after a result.
    "LiteLlm mistral": Row(Taken()),
    # These two classes leave out the files of a result.
    "OpenAIResponsesLlm": Row(Taken(_IMAGES_AND_GIF | _PDF, {"file-": _PDF})),
    "OpenAILlm": Row(_CHAT_IMAGES),
    # The class sends every file as an image.
    "ApigeeLlm chat": Row(_SOME_IMAGES, _SOME_IMAGES),
    # Any other class.
    "": Row(Taken(_IMAGES_AND_GIF | _PDF)),
}
"""The images and files that clients take, by the names of `name_media_clients`."""

# The rows of the providers to which LiteLlm sends no addresses.
_LITELLM_WITHOUT_ADDRESSES = (
    "LiteLlm anthropic",
    "LiteLlm vertex_ai",
    "LiteLlm vertex_ai claude",
)
# The MIME types that LiteLlm sends as bytes: all with one of these beginnings, and the
# types of `_LITELLM_FILES`. LiteLlm raises on bytes of any other type.
_LITELLM_TYPE_BEGINNINGS = ("text/", "image/", "audio/", "video/")
_LITELLM_FILES = _PDF | {
    "application/msword",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation",
    "application/json",
    "application/x-sh",
}


def takes_media(client: str, place: Place, part: types.Part) -> bool:
    """Returns whether a client is known to take a medium in a place.

    Args:
        client: The name of the client's row, from `name_media_clients`.
        place: Where the medium would be sent.
        part: A part with a medium: with bytes, or else with an address.
    """
    row = ROWS[client]
    taken = row.user if place == "user" else row.result

    blob = part.inline_data
    if blob is not None:
        # Clients leave out a part without bytes.
        has_bytes = bool(blob.data)
        return has_bytes and blob.mime_type in taken.inline

    file = part.file_data
    if file is None or not file.file_uri:
        return False
    for beginning, mime_types in taken.addresses.items():
        if file.file_uri.startswith(beginning) and file.mime_type in mime_types:
            return True
    return False


def refuses_media(client: str, part: types.Part) -> bool:
    """Returns whether ADK's class is known to raise on a medium of the user's message.

    Only `AnthropicLlm` and `LiteLlm` check the media that they send. If the result is
    False, the provider's API may still refuse the medium.

    Args:
        client: The name of the client's row, from `name_media_clients`.
        part: A part with a medium.
    """
    if client == "AnthropicLlm":
        return _claude_refuses(part)
    if not client.startswith("LiteLlm"):
        return False

    # LiteLlm sends the bytes of a part if they have a type, else the address.
    blob = part.inline_data
    if blob and blob.data and blob.mime_type:
        mime_type = _without_parameters(blob.mime_type).lower()
        has_sent_beginning = mime_type.startswith(_LITELLM_TYPE_BEGINNINGS)
        is_sent = has_sent_beginning or mime_type in _LITELLM_FILES
        return not is_sent

    file = part.file_data
    if file and file.file_uri:
        mime_type = _without_parameters(file.mime_type or "").lower()
        return _refuses_address(client, file.file_uri, mime_type)
    return False  # LiteLlm leaves out a part with neither.


def _claude_refuses(part: types.Part) -> bool:
    """Returns whether ADK's Claude class raises on a medium of the user's message.

    The class takes only bytes, and only those of a PDF or of some images.
    """
    blob = part.inline_data
    if blob is None or blob.data is None:
        return True
    # The class does not know MIME types with capitals, so they stay as they are.
    mime_type = _without_parameters(blob.mime_type or "")
    return mime_type not in _OF_CLAUDE.inline


def _refuses_address(client: str, address: str, mime_type: str) -> bool:
    """Returns whether LiteLlm is known to raise on a medium that is sent as an address.

    - For a row of `_LITELLM_WITHOUT_ADDRESSES`: LiteLlm raises on all addresses.
    - For OpenAI: LiteLlm sends ids of files, and links to images and videos. LiteLlm
      raises on all other addresses.
    - For any other row: LiteLlm raises only if the type says nothing about the medium.

    Args:
        client: The name of the row of LiteLlm.
        address: The address.
        mime_type: The MIME type in lower case, without parameters; "" for no type.
    """
    if client in _LITELLM_WITHOUT_ADDRESSES:
        return True

    if client == "LiteLlm openai":
        is_file_id = address.startswith(("file-", "assistant-"))
        is_link = address.startswith(("http://", "https://"))
        is_image_or_video = mime_type.startswith(("image/", "video/"))
        is_sent = is_file_id or (is_link and is_image_or_video)
        return not is_sent

    # This type stands for any bytes. If the type is "", LiteLlm guesses a type.
    return mime_type == "application/octet-stream"


def _without_parameters(mime_type: str) -> str:
    """Returns a MIME type without its parameters.

    "image/png; name=a.png" -> "image/png"
    """
    return mime_type.partition(";")[0].strip()


def name_media_clients(llm: object, model: str) -> tuple[str, ...]:
    """Returns the names of the rows of `ROWS` for a model, at least one.

    A `FallbackModel` has a row for each model that it may ask. Any other model has one
    row.

    Args:
        llm: The model object that ADK calls; None if the object is unknown.
        model: The name of the model in the request.
    """
    row_names: list[str] = []
    for asked_llm in list_models(llm):
        if asked_llm is llm:
            asked_model = model
        else:  # A model of a `FallbackModel` has a name of its own.
            asked_model = str(getattr(asked_llm, "model", ""))
        row_names.append(_name_row(asked_llm, asked_model))

    if not row_names:  # A `FallbackModel` without models counts as an unknown class.
        return ("",)
    return tuple(row_names)


def _name_row(llm: object, model: str) -> str:
    """Returns the name of the row for a model; "" if the model's class has no row.

    The classes are compared in the order below: the first that is the model's class or
    a base class of it decides.

    Args:
        llm: The model object; None if the object is unknown.
        model: The name of the model.
    """
    class_names = [base.__name__ for base in type(llm).__mro__]
    if "LiteLlm" in class_names:
        return _name_litellm_row(model.lower())

    if "ApigeeLlm" in class_names:
        # Apigee is a gateway. It speaks OpenAI's chat API or Gemini's API.
        api_type = getattr(llm, "_api_type", None)  # An enum of ADK.
        is_chat = getattr(api_type, "value", "") == "chat_completions"
        return "ApigeeLlm chat" if is_chat else "Gemini"

    # ADK's class for Gemma on Google's API derives from this class and from `Gemini`.
    if "GemmaFunctionCallingMixin" in class_names:
        return "Gemma"

    if "Gemini" in class_names:
        # "projects/…" is the address of a model on Vertex AI.
        is_on_vertex = _uses_vertex() or model.startswith("projects/")
        return "Gemini on Vertex AI" if is_on_vertex else "Gemini"

    for row in ("AnthropicLlm", "OpenAIResponsesLlm", "OpenAILlm"):
        if row in class_names:
            return row
    return ""


def _name_litellm_row(model: str) -> str:
    """Returns the name of the row for a model of LiteLlm.

    The first of these rows that `ROWS` has is taken:

    - of provider and family: "vertex_ai/claude-opus-4-7" -> "LiteLlm vertex_ai claude"
    - of the provider: "openai/gpt-5.2" -> "LiteLlm openai"
    - of the class: "groq/llama-4" -> "LiteLlm"

    Args:
        model: The name of the model in lower case.
    """
    provider = _find_provider(model)
    for family in ("gemini", "claude"):
        family_row = f"LiteLlm {provider} {family}"
        if family in model and family_row in ROWS:
            return family_row

    row = f"LiteLlm {provider}"
    return row if row in ROWS else "LiteLlm"


def _find_provider(model: str) -> str:
    """Returns the provider of a model of LiteLlm; "" if the name does not tell it.

    Azure counts as OpenAI, because both have the same API.

    Args:
        model: The name of the model in lower case.
    """
    if "/" in model:
        provider = model.partition("/")[0]
        return "openai" if provider == "azure" else provider

    # ADK takes these names without a provider for models of OpenAI.
    is_openai = "azure" in model or model.startswith(("gpt-", "o1"))
    return "openai" if is_openai else ""


def _uses_vertex() -> bool:
    """Returns whether the environment sends Gemini's requests to Vertex AI."""
    for name in ("GOOGLE_GENAI_USE_ENTERPRISE", "GOOGLE_GENAI_USE_VERTEXAI"):
        if os.environ.get(name, "").lower() in ("true", "1"):
            return True
    return False
