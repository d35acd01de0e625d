"""What the table says that clients take is what the installed classes do take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.adk.models.base_llm import BaseLlm
from google.adk.models.gemma_llm import Gemma
from google.adk.models.google_llm import Gemini
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk._history.moved_media import MediaMover
from contextguard_adk._providers.media import (
    ROWS,
    Place,
    name_media_clients,
    refuses_media,
    takes_media,
)
from contextguard_adk.testing import SimulatedLlm
from tests.fake_gemini import FakeGemini
from tests.files import files_of, holds, in_result, inline, linked
from tests.players import Serve

pytestmark = [
    pytest.mark.litellm,  # Its import takes seconds.
    # Those of the clients, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MODELS = {
    "Gemini": "gemini-flash-latest",
    "Gemma": "gemma-3-27b-it",
    "AnthropicLlm": "claude-opus-4-7",
    "LiteLlm": "ollama_chat/llava",
    "LiteLlm openai": "openai/gpt-in-house",
    "LiteLlm anthropic": "anthropic/claude-opus-4-7",
    "LiteLlm vertex_ai": "vertex_ai/llama-4",
    "LiteLlm vertex_ai claude": "vertex_ai/claude-opus-4-7",
    "LiteLlm bedrock claude": "bedrock/anthropic.claude-opus-4-7",
    "LiteLlm gemini": "gemini/gemini-flash-latest",
    "LiteLlm vertex_ai gemini": "vertex_ai/gemini-flash-latest",
    "LiteLlm deepseek": "deepseek/deepseek-v4-flash",
    "LiteLlm mistral": "mistral/mistral-large-latest",
    "OpenAIResponsesLlm": "gpt-in-house",
    "OpenAILlm": "gpt-in-house",
    "ApigeeLlm chat": "apigee/openai/gpt-in-house",
}
"""A model for each row whose class can be made here."""

FILES = {
    **files_of("table"),
    "gif": inline("image/gif", b"gif"),
    "bmp": inline("image/bmp", b"bmp"),
    "svg": inline("image/svg+xml", b"<svg/>"),
    "heic": inline("image/heic", b"heic"),
    "mp3": inline("audio/mpeg", b"mp3"),
    "zip": inline("application/zip", b"zip"),
    "xml": inline("application/xml", b"<xml/>"),
    "word": inline("application/msword", b"word"),
    "shouted": inline("IMAGE/PNG", b"shouted"),
    "with parameters": inline("image/png; q=1", b"parameters"),
    "without a kind": inline(None, b"unknown"),
    "empty": inline("image/png", b""),
    "bucket": linked("gs://bucket/plan.pdf", "application/pdf"),
    "bucket without a kind": linked("gs://bucket/plan", "application/octet-stream"),
    "id": linked("file-123", "application/pdf"),
    "link to a pdf": linked("https://files.test/plan.pdf", "application/pdf"),
    "no address": linked(""),
}

Send = Callable[[types.Content], Awaitable[Any]]


def make(row: str) -> BaseLlm:
    """A model of the class of a row."""
    model = MODELS[row]
    if row == "AnthropicLlm":
        from google.adk.models.anthropic_llm import AnthropicLlm

        return AnthropicLlm(model=model)
    if row.startswith("LiteLlm"):
        from google.adk.models.lite_llm import LiteLlm

        return LiteLlm(model=model)
    if row.startswith("OpenAI"):
        openai = pytest.importorskip("google.adk.integrations.openai")
        made: BaseLlm = getattr(openai, row)(model=model, api_key="key")
        return made
    if row == "ApigeeLlm chat":
        from google.adk.models.apigee_llm import ApigeeLlm

        return ApigeeLlm(model=model, proxy_url="http://127.0.0.1:9")
    return (Gemma if row == "Gemma" else Gemini)(model=model)


def converter(row: str) -> Send:
    """What the class of a row makes of a content."""

    async def send(content: types.Content) -> Any:
        if row == "AnthropicLlm":
            from google.adk.models.anthropic_llm import content_to_message_param

            return content_to_message_param(content)
        if row.startswith("LiteLlm"):
            from google.adk.models import lite_llm

            model = MODELS[row]
            provider = model.partition("/")[0]
            return await lite_llm._content_to_message_param(
                content, provider=provider, model=model
            )
        if row == "OpenAIResponsesLlm":
            from google.adk.integrations.openai import _openai_responses_llm as module

            return module._content_to_response_input_items(content)
        if row == "OpenAILlm":
            from google.adk.integrations.openai import _openai_llm

            return _openai_llm._content_to_openai_messages(content)
        from google.adk.models.apigee_llm import CompletionsHTTPClient

        client = CompletionsHTTPClient("http://127.0.0.1:9")
        return client._content_to_messages(content)

    return send


def content_in(place: Place, *files: types.Part) -> types.Content:
    """A content with files in a place."""
    parts = [*files] if place == "user" else [in_result("export", *files)]
    return types.Content(role="user", parts=parts)


def maps_results(row: str) -> bool:
    """Whether this ADK sends what results hold."""
    if row == "AnthropicLlm":
        from google.adk.models import anthropic_llm

        return hasattr(anthropic_llm, "_function_response_media_blocks")
    if row == "ApigeeLlm chat":
        from google.adk.models import apigee_llm

        return hasattr(apigee_llm, "_function_response_media_content_parts")
    from google.adk.models import lite_llm

    return hasattr(lite_llm, "_function_response_media_parts")


@pytest.mark.parametrize("row", MODELS)
def test_a_model_finds_its_row(row: str) -> None:
    """By the class of its client, and with LiteLLM by its provider."""
    llm = make(row)
    assert name_media_clients(llm, llm.model) == (row,)


def test_rows_of_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes, environments and names without a provider."""
    lite = make("LiteLlm")
    names = {
        "azure/gpt-5.4-mini": "LiteLlm openai",
        "gpt-5.4-mini": "LiteLlm openai",
        "litellm_proxy/openai/gpt-5.4-mini": "LiteLlm",
        "openrouter/anthropic/claude-opus-4": "LiteLlm",
        "bedrock/meta.llama4": "LiteLlm",
        "": "LiteLlm",
    }
    for name, row in names.items():
        assert name_media_clients(lite, name) == (row,)

    for variable in ("GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_ENTERPRISE"):
        monkeypatch.delenv(variable, raising=False)
    own = type("Own", (Gemini,), {})(model="gemini-flash-latest")
    assert name_media_clients(own, own.model) == ("Gemini",)
    monkeypatch.setenv("GOOGLE_GENAI_USE_VERTEXAI", "TRUE")
    assert name_media_clients(own, own.model) == ("Gemini on Vertex AI",)

    assert name_media_clients(SimulatedLlm(), "claude-opus-4-7") == ("",)
    assert name_media_clients(None, "") == ("",)


def test_of_several_models_each_has_its_row() -> None:
    """The one that answers may be any of them."""
    models = pytest.importorskip("google.adk.models")
    if not hasattr(models, "FallbackModel"):
        pytest.skip("this ADK has no such model")
    llm = models.FallbackModel(models=[make("Gemini"), make("LiteLlm openai")])
    assert name_media_clients(llm, llm.model) == ("Gemini", "LiteLlm openai")
    mover = MediaMover(llm, llm.model, 500)
    assert mover.takes(FILES["png"])
    assert not mover.takes(FILES["pdf"])


@pytest.mark.parametrize("place", ["user", "result"])
@pytest.mark.parametrize("row", [row for row in MODELS if row[:3] != "Gem"])
async def test_what_a_client_takes_is_sent(row: str, place: Place) -> None:
    """Each file that its row names is in what the class makes of the content."""
    make(row)
    taken = [file for file in FILES.values() if takes_media(row, place, file)]
    if taken and (place == "user" or maps_results(row)):
        sent = await converter(row)(content_in(place, *taken))
        assert [file for file in taken if not holds(sent, file)] == []


@pytest.mark.parametrize("row", [row for row in MODELS if row[:3] != "Gem"])
async def test_what_is_moved_can_be_sent(row: str) -> None:
    """Of any files: some go as they are, the others as a text."""
    moved, told = MediaMover(make(row), MODELS[row], 500).split(FILES.values())
    text = types.Part(text="\n".join(told))
    sent = await converter(row)(content_in("user", text, *moved))
    assert len(moved) + len(told) == len(FILES)
    assert [file for file in moved if not holds(sent, file)] == []


@pytest.mark.parametrize("row", ["Gemini", "Gemma"])
async def test_what_gemini_takes_is_sent(serve: Serve, row: str) -> None:
    """Each file of its row is in the request."""
    fake = FakeGemini()
    address = serve(fake)
    llm = (Gemma if row == "Gemma" else Gemini)(model=MODELS[row], base_url=address)
    taken = [file for file in FILES.values() if takes_media(row, "user", file)]
    request = LlmRequest(model=llm.model, contents=[content_in("user", *taken)])
    async for _ in llm.generate_content_async(request):
        pass
    assert len(taken) >= 1

    body = fake.exchanges[-1].body
    assert [file for file in taken if not holds(body, file)] == []


REFUSING = [row for row in MODELS if row.startswith(("AnthropicLlm", "LiteLlm"))]


@pytest.mark.parametrize("row", REFUSING)
async def test_what_a_class_raises_on_is_known(row: str) -> None:
    """What the user has sent, and what no class refuses, is left to the API."""
    make(row)
    files = {**FILES}
    if row == "LiteLlm openai":
        # They would be uploaded.
        uploaded = [files.pop(kind) for kind in ("json", "pdf", "word")]
        assert not any(takes_media(row, "user", file) for file in uploaded)
        assert not any(refuses_media(row, file) for file in uploaded)

    raised = {kind for kind, file in files.items() if await raises(row, file)}
    refused = {kind for kind, file in files.items() if refuses_media(row, file)}
    assert refused == raised if raises_early() else refused >= raised
    assert not any(takes_media(row, "user", files[kind]) for kind in raised)


def raises_early() -> bool:
    """Whether this ADK raises on what older ones leave to the API."""
    from google.adk.models import lite_llm

    return hasattr(lite_llm, "_is_file_uri_supported")


async def raises(row: str, file: types.Part) -> bool:
    """Whether a class raises on a user's message with a file."""
    try:
        await converter(row)(content_in("user", types.Part(text="Look."), file))
    except (NotImplementedError, ValueError):
        return True
    return False


def test_nothing_unknown_is_taken() -> None:
    """No row takes what has no bytes, no address or a kind that nobody reads."""
    never = ("empty", "no address", "without a kind", "zip", "shouted", "text", "csv")
    for row in ROWS:
        for place in ("user", "result"):
            assert not any(takes_media(row, place, FILES[kind]) for kind in never)


def test_all_of_the_table_can_be_read() -> None:
    """Every row is of a client that a model is named for, or of another way to it."""
    assert {*ROWS} - {*MODELS} == {"", "Gemini on Vertex AI"}
