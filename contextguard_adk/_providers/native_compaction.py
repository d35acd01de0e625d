"""Finds out whether a provider compacts a history, and ADK loses what it returns.

A provider that compacts a history returns an item that stands for the messages so far.
Later requests have to hold this item. ADK's classes drop it, so each later request has
all messages again, and the provider compacts them again and bills for it. This was seen
with ADK 2.13 and LiteLLM 1.110.

Context editing is no compaction: a provider that clears old results of tools returns
nothing that a later request has to hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.genai import types

from contextguard_adk._providers.clients import Client, list_models

LOST_COMPACTION = (
    "`context_management` has the provider compact the history, but ADK drops what the "
    "provider returns for it, so each call compacts anew and is billed for it: leave "
    "compaction to the guard (context editing, such as clear_tool_uses_20250919, works)"
)
"""What users are told of a compaction that ADK loses."""

# How the names of compactions begin: "compact_20260112" of Claude, "compaction" of
# OpenAI. Those of context editing begin with "clear_".
_COMPACTION = "compact"


def loses_compaction(llm: object, config: types.GenerateContentConfig | None) -> bool:
    """Returns whether a model is set to compact, and ADK loses the compaction.

    For a `FallbackModel`, each of its models counts. What the class of a user, a proxy
    or a server is set to cannot be seen from here.

    Args:
        llm: The model object that ADK calls, or the name of a model, which has no
            settings.
        config: The config of the agent or of the request; None for no config.
    """
    http_options = config.http_options if config else None
    extra_body = http_options.extra_body if http_options else None
    if _compacts(extra_body):
        return True

    return any(
        _compacts(arguments)
        for model in list_models(llm)
        for arguments in _list_arguments(model)
    )


def _list_arguments(llm: object) -> Iterator[object]:
    """Yields the arguments that a model object adds to its requests.

    - Those of `LiteLlm` may have `fallbacks`: models, each with arguments of its own.
    - `OpenAIResponsesLlm` has them in a field.
    - In all of these, `extra_body` has more of them.
    """
    litellm_arguments = Client.of(llm).litellm_arguments
    yield litellm_arguments
    yield litellm_arguments.get("extra_body")
    fallbacks = litellm_arguments.get("fallbacks")
    for fallback in fallbacks if isinstance(fallbacks, list | tuple) else ():
        yield fallback
        if isinstance(fallback, dict):
            yield fallback.get("extra_body")

    responses_arguments = getattr(llm, "extra_request_args", None)
    yield responses_arguments
    if isinstance(responses_arguments, dict):
        yield responses_arguments.get("extra_body")


def _compacts(arguments: object) -> bool:
    """Returns whether arguments have the provider compact.

    Claude has {"context_management": {"edits": [{"type": "compact_20260112"}]}}, OpenAI
    has {"context_management": [{"type": "compaction"}]}.

    Args:
        arguments: The arguments; any other value is no compaction.
    """
    if not isinstance(arguments, dict):
        return False

    management = arguments.get("context_management")
    edits = management.get("edits") if isinstance(management, dict) else management
    if not isinstance(edits, list | tuple):
        return False
    kinds = [str(edit.get("type")) for edit in edits if isinstance(edit, dict)]
    return any(kind.startswith(_COMPACTION) for kind in kinds)
