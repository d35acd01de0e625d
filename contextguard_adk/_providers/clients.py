"""What ADK's model classes send: how they spell results, what they reserve."""

# Read in ADK 2.0 to 2.13. A class is known by its name, so that none is imported.

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.readonly_context import ReadonlyContext
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.registry import LLMRegistry
from google.genai import types

from contextguard_adk._measuring.tokens import COMPACT, JsonForm
from contextguard_adk._providers.registry import ModelRegistry, resolve_output_limit
from contextguard_adk.records import Usage

# What litellm makes of `reasoning_effort` for models that take a number.
_EFFORT_TOKENS = {
    "minimal": 128, "low": 1_024, "medium": 2_048, "high": 4_096, "xhigh": 8_192,
    "max": 16_384,
}  # fmt: skip


# What litellm asks of Claude models that its table does not have.
_LITELLM_OUTPUT_TOKENS = 128_000


def find_llm(agent: object) -> BaseLlm | None:
    """The model of an agent, where ADK can name it without a call."""
    model = getattr(agent, "canonical_model", None)
    return model if isinstance(model, BaseLlm) else None


async def resolve_llm(run: InvocationContext) -> BaseLlm | None:
    """Returns the model that ADK calls for this agent."""
    resolve = getattr(run.agent, "canonical_model_async", None)  # Not in ADK 2.0.
    llm = await resolve(ReadonlyContext(run)) if resolve else find_llm(run.agent)
    return llm if isinstance(llm, BaseLlm) else None


def name_client(llm: object) -> str:
    """Names the class of ADK that sends a model's requests, else the model's own."""
    names = class_names(_first_model(llm))
    known = ("LiteLlm", "AnthropicLlm", "Gemini")
    return next((name for name in known if name in names), names[0])


def json_form(llm: object) -> JsonForm:
    """Returns how a model's client spells JSON; compact where that is unknown."""
    names = class_names(_first_model(llm))
    return next((_FORMS[name] for name in names if name in _FORMS), COMPACT)


def set_output_tokens(llm: object, config: types.GenerateContentConfig) -> int | None:
    """Returns the output limit that somebody has set; None where nobody has."""
    if config.max_output_tokens:
        return config.max_output_tokens
    llm = _first_model(llm)
    names = class_names(llm)
    values: list[object] = []
    if "AnthropicLlm" in names and "max_tokens" in getattr(llm, "model_fields_set", ()):
        values = [getattr(llm, "max_tokens", None)]
    elif "LiteLlm" in names:
        arguments = _litellm_arguments(llm)
        values = [arguments.get("max_completion_tokens"), arguments.get("max_tokens")]
    found = (each for each in values if isinstance(each, int) and each > 0)
    return next(found, None)


def default_output_tokens(
    llm: object, model: str, registry: ModelRegistry | None = None
) -> int | None:
    """Returns the output that a client asks for where nobody has set a limit.

    None where it names none. Anthropic's API wants a number.
    """
    llm = _first_model(llm)
    names = class_names(llm)
    if "AnthropicLlm" in names:
        tokens = getattr(llm, "max_tokens", None)
        return tokens if isinstance(tokens, int) and tokens > 0 else None
    provider, _, name = model.lower().rpartition("/")
    is_anthropic = provider in ("", "anthropic", "vertex_ai", "azure_ai")
    if "LiteLlm" in names and is_anthropic and "claude" in name:
        return resolve_output_limit(model, registry) or _LITELLM_OUTPUT_TOKENS
    return None


def thinking_tokens(llm: object, config: types.GenerateContentConfig) -> int:
    """Returns how many tokens of thoughts a call asks for; 0 where it names no number.

    An output limit must be above that. It stands in the request's config, or in what
    `LiteLlm` was made with.
    """
    asked = config.thinking_config and config.thinking_config.thinking_budget
    if asked is None and (arguments := _litellm_arguments(_first_model(llm))):
        thinking = arguments.get("thinking")
        if isinstance(thinking, Mapping):
            asked = thinking.get("budget_tokens")
        else:
            asked = _EFFORT_TOKENS.get(str(arguments.get("reasoning_effort")))
    return max(0, asked) if isinstance(asked, int) else 0


def answers_freely(request: LlmRequest, agent: object) -> bool:
    """Returns whether no built-in tool, schema or forced choice decides the answer."""
    config = request.config
    for tool in config.tools or ():
        settings = tool if isinstance(tool, types.Tool) else ()
        kinds = [name for name, value in settings if value is not None]
        if kinds != ["function_declarations"]:
            return False
    has_schema = config.response_schema or config.response_json_schema
    if has_schema or getattr(agent, "output_schema", None) is not None:
        return False
    calling = config.tool_config and config.tool_config.function_calling_config
    mode = calling.mode if calling else None
    return mode in (None, "AUTO", "VALIDATED", "MODE_UNSPECIFIED")


def read_tokens(reported: int | None) -> int:
    """Reads a number of tokens; 0 where there is none, or one below zero."""
    return max(0, reported or 0)


def read_usage(reported: types.GenerateContentResponseUsageMetadata | None) -> Usage:
    """Reads what a call took; zeros where its client reports nothing."""
    if reported is None:
        return Usage()
    prompt = read_tokens(reported.prompt_token_count)
    prompt += read_tokens(reported.tool_use_prompt_token_count)
    output = read_tokens(reported.candidates_token_count)
    total = read_tokens(reported.total_token_count)
    # `LiteLlm` counts thoughts among what was written, Gemini and Claude beside it:
    # the total tells.
    if total and prompt:
        output = max(output, total - prompt)
    else:
        output += read_tokens(reported.thoughts_token_count)
    cached = read_tokens(reported.cached_content_token_count)
    return Usage(max(prompt, cached), cached, output)


def list_models(llm: object) -> list[object]:
    """Returns the models that ADK's `FallbackModel` may ask; any other as it is."""
    if "FallbackModel" not in class_names(llm):
        return [llm]
    return [_make_model(each) for each in getattr(llm, "models", [])]


def _first_model(llm: object) -> object:
    """The model that ADK's `FallbackModel` asks first; any other as it is."""
    if "FallbackModel" not in class_names(llm):
        return llm
    return _make_model(getattr(llm, "models", [None])[0])


def _make_model(model: object) -> object:
    # Newer google-adk: a `FallbackModel` may have names of models.
    return LLMRegistry.new_llm(model) if isinstance(model, str) else model


def _litellm_arguments(llm: object) -> Mapping[str, Any]:
    arguments = getattr(llm, "_additional_args", None)
    return arguments if isinstance(arguments, Mapping) else {}


def class_names(llm: object) -> list[str]:
    """Returns the names of a model's class and of those that it derives from."""
    return [each.__name__ for each in type(llm).__mro__]


def _spell_for_claude(response: dict[str, Any]) -> str:
    """The text of an MCP result, the value that ADK has wrapped, or all as ASCII."""
    content = response.get("content")
    if content and isinstance(content, list):
        texts = (
            block.get("text", block)
            if isinstance(block, dict) and block.get("type") == "text"
            else block
            for block in content
        )
        return "\n".join(map(str, texts))
    if content and isinstance(content, str):
        return content
    # ADK 2.0 sends the value where others stand beside it, too.
    is_wrapped = response.keys() == {"result"} and response["result"] is not None
    value = response["result"] if is_wrapped else response
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


_FOR_LITELLM = partial(json.dumps, ensure_ascii=False)
_FORMS = {
    # Before LiteLlm: one class is both.
    "GemmaFunctionCallingMixin": JsonForm(result=json.dumps),
    "LiteLlm": JsonForm(_FOR_LITELLM, _FOR_LITELLM),
    "AnthropicLlm": JsonForm(result=_spell_for_claude),
}
