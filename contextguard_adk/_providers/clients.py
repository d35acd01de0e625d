"""ADK's model classes as clients: how they spell results, and what they reserve.

A client is the object of ADK that sends a model's requests. The facts were read in ADK
2.0 to 2.13. A class is known by its name, so that none is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.readonly_context import ReadonlyContext
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.registry import LLMRegistry
from google.genai import types

from contextguard_adk._measuring.tokens import COMPACT, JsonForm
from contextguard_adk._providers.registry import ModelRegistry, resolve_output_limit
from contextguard_adk.records import Usage

_NAMED_CLIENTS = ("LiteLlm", "AnthropicLlm", "Gemini")

# What LiteLLM makes of `reasoning_effort` for models that take a number.
_EFFORT_TOKENS = {
    "minimal": 128,
    "low": 1_024,
    "medium": 2_048,
    "high": 4_096,
    "xhigh": 8_192,
    "max": 16_384,
}

# The output that LiteLLM asks of Claude models that its table does not have.
_LITELLM_OUTPUT_TOKENS = 128_000

# The providers in whose API, by LiteLLM, Claude needs a number of output tokens.
_LITELLM_CLAUDE_PROVIDERS = ("", "anthropic", "vertex_ai", "azure_ai")

# Ways to choose tools that still let the model answer in plain text.
_FREE_MODES = (None, "AUTO", "VALIDATED", "MODE_UNSPECIFIED")


def find_llm(agent: object) -> BaseLlm | None:
    """Returns the model of an agent; None if only a coroutine of ADK can name it."""
    model = getattr(agent, "canonical_model", None)
    return model if isinstance(model, BaseLlm) else None


async def resolve_llm(run: InvocationContext) -> BaseLlm | None:
    """Returns the model that ADK calls for this agent."""
    resolve = getattr(run.agent, "canonical_model_async", None)
    if resolve is None:  # ADK 2.0 does not have it.
        llm: object = find_llm(run.agent)
    else:
        llm = await resolve(ReadonlyContext(run))  # Newer google-adk
    return llm if isinstance(llm, BaseLlm) else None


class Client(NamedTuple):
    """The object that sends the requests of a model.

    Attributes:
        llm: The model as ADK calls it; of a `FallbackModel` the first that it asks.
        class_names: The names of its class and of those that it derives from.
    """

    llm: object
    class_names: list[str]

    @classmethod
    def of(cls, llm: object) -> Client:
        """Returns the client of a model.

        Args:
            llm: The model as ADK calls it; None if it is not known.
        """
        class_names = [base.__name__ for base in type(llm).__mro__]
        if "FallbackModel" not in class_names:
            return cls(llm, class_names)

        models = getattr(llm, "models", [None])
        first_model = _make_model(models[0])
        return cls.of(first_model)

    @property
    def name(self) -> str:
        """The class of ADK that sends the requests, else the class of the model."""
        for name in _NAMED_CLIENTS:
            if name in self.class_names:
                return name
        return self.class_names[0]

    @property
    def litellm_arguments(self) -> Mapping[str, Any]:
        """The arguments that `LiteLlm` was made with; empty for other classes."""
        arguments = getattr(self.llm, "_additional_args", None)
        return arguments if isinstance(arguments, Mapping) else {}

    def chosen_output_tokens(self, config: types.GenerateContentConfig) -> int | None:
        """Returns the output limit that the user has chosen; None for no choice.

        A limit in the config of the request goes before one in the model's arguments.
        """
        if config.max_output_tokens:
            return config.max_output_tokens

        argument_limits: list[object] = []
        if "AnthropicLlm" in self.class_names:
            # Its field has a default, which is no choice of the user.
            fields_set_by_user = getattr(self.llm, "model_fields_set", ())
            if "max_tokens" in fields_set_by_user:
                argument_limits = [getattr(self.llm, "max_tokens", None)]
        elif "LiteLlm" in self.class_names:
            arguments = self.litellm_arguments
            argument_limits = [
                arguments.get("max_completion_tokens"),
                arguments.get("max_tokens"),
            ]

        for limit in argument_limits:
            if isinstance(limit, int) and limit > 0:
                return limit
        return None

    def default_output_tokens(
        self, model: str, registry: ModelRegistry | None = None
    ) -> int | None:
        """Returns the output limit that the client sends if the user has chosen none.

        Anthropic's API is the only one that demands a limit. For other models the
        client sends none, and the result is None.

        Args:
            model: The name of the model.
            registry: Knows the output limits of models; None asks LiteLLM's table.
        """
        if "AnthropicLlm" in self.class_names:
            limit = getattr(self.llm, "max_tokens", None)
            return limit if isinstance(limit, int) and limit > 0 else None

        if "LiteLlm" in self.class_names:
            # "vertex_ai/claude-opus-4-1" -> "vertex_ai", "claude-opus-4-1"
            provider, _, name = model.lower().rpartition("/")
            if provider in _LITELLM_CLAUDE_PROVIDERS and "claude" in name:
                return resolve_output_limit(model, registry) or _LITELLM_OUTPUT_TOKENS
        return None


def json_form(llm: object) -> JsonForm:
    """Returns the form in which a model's client spells payloads.

    A payload is the arguments of a call, or the result of a tool. Unknown clients are
    assumed to spell it as compact JSON.
    """
    for name in Client.of(llm).class_names:
        if name in _FORMS:
            return _FORMS[name]
    return COMPACT


def thinking_tokens(llm: object, config: types.GenerateContentConfig) -> int:
    """Returns how many tokens of thoughts a call asks for; 0 if it names no number.

    An output limit must be above this number. The number stands in the first of these
    places that has one:

    1. in the request's config, as `thinking_budget`
    2. in the argument `thinking` of `LiteLlm`, as `budget_tokens`
    3. behind the argument `reasoning_effort` of `LiteLlm`, if it has no `thinking`
    """
    thinking_config = config.thinking_config
    config_tokens = thinking_config.thinking_budget if thinking_config else None

    arguments = Client.of(llm).litellm_arguments
    thinking_argument = arguments.get("thinking")
    asked_tokens: object
    if config_tokens is not None:
        asked_tokens = config_tokens
    elif isinstance(thinking_argument, Mapping):
        asked_tokens = thinking_argument.get("budget_tokens")
    else:
        effort = str(arguments.get("reasoning_effort"))
        asked_tokens = _EFFORT_TOKENS.get(effort)

    # Gemini's -1 leaves the number to the model.
    return max(0, asked_tokens) if isinstance(asked_tokens, int) else 0


def answers_freely(request: LlmRequest, agent: object) -> bool:
    """Returns whether the model is sure to be free to answer in plain text.

    It is not in these cases:

    - A schema decides the form of its answer.
    - It has to call a tool.
    - There are tools other than declared functions, which may decide the form.
    """
    config = request.config
    for tool in config.tools or ():
        if not isinstance(tool, types.Tool):
            return False
        # Iterating over a Pydantic model yields its fields: one for each kind of tool.
        set_fields = [name for name, value in tool if value is not None]
        if set_fields != ["function_declarations"]:
            return False

    if config.response_schema or config.response_json_schema:
        return False
    if getattr(agent, "output_schema", None) is not None:
        return False

    calling = config.tool_config and config.tool_config.function_calling_config
    mode = calling.mode if calling else None
    return mode in _FREE_MODES


def read_tokens(reported: int | None) -> int:
    """Returns a reported number of tokens; 0 if there is none, or one below zero."""
    return max(0, reported or 0)


def read_usage(reported: types.GenerateContentResponseUsageMetadata | None) -> Usage:
    """Reads the tokens of a call; zeros if its client reports nothing."""
    if reported is None:
        return Usage()

    message_tokens = read_tokens(reported.prompt_token_count)
    tool_use_tokens = read_tokens(reported.tool_use_prompt_token_count)
    sent_tokens = message_tokens + tool_use_tokens
    cached_tokens = read_tokens(reported.cached_content_token_count)
    candidate_tokens = read_tokens(reported.candidates_token_count)
    total_tokens = read_tokens(reported.total_token_count)

    # `LiteLlm` reports thoughts as a part of the candidates, Gemini and Claude beside
    # them. The total includes them in both cases.
    if total_tokens and sent_tokens:
        output_tokens = max(candidate_tokens, total_tokens - sent_tokens)
    else:
        thought_tokens = read_tokens(reported.thoughts_token_count)
        output_tokens = candidate_tokens + thought_tokens

    # A prompt is at least as large as the part of it that was cached.
    prompt_tokens = max(sent_tokens, cached_tokens)
    return Usage(prompt_tokens, cached_tokens, output_tokens)


def list_models(llm: object) -> list[object]:
    """Returns the models that a model may ask.

    These are the models of ADK's `FallbackModel`. Any other model asks only itself.
    """
    if all(base.__name__ != "FallbackModel" for base in type(llm).__mro__):
        return [llm]
    return [_make_model(model) for model in getattr(llm, "models", [])]


def _make_model(model: object) -> object:
    """Returns a model of a `FallbackModel`."""
    # Newer google-adk: such a model may be given by its name.
    return LLMRegistry.new_llm(model) if isinstance(model, str) else model


def _spell_for_claude(response: dict[str, Any]) -> str:
    """Spells a result as ADK's Claude class does. Its JSON is ASCII.

    The class sends one of these:

    - The texts of an MCP result, which stand under "content".
    - The value under "result", if this is the only key: ADK wraps other values than
      dicts so.
    - Else the whole result.
    """
    content = response.get("content")
    if content and isinstance(content, list):
        return "\n".join(str(_read_block(block)) for block in content)
    if content and isinstance(content, str):
        return content

    # ADK 2.0 leaves out the keys beside "result". They are measured as newer releases
    # send them, so that for 2.0 the measure may be too high, but not too low.
    is_wrapped = response.keys() == {"result"} and response["result"] is not None
    sent: object = response["result"] if is_wrapped else response
    return json.dumps(sent) if isinstance(sent, dict | list) else str(sent)


def _read_block(block: object) -> object:
    """Returns the text of a text block of an MCP result; other blocks as they are."""
    if isinstance(block, dict) and block.get("type") == "text":
        return block.get("text", block)
    return block


_FOR_LITELLM = partial(json.dumps, ensure_ascii=False)
_FORMS = {
    # ADK's `Gemma3Ollama` derives from this class first, and then from `LiteLlm`.
    "GemmaFunctionCallingMixin": JsonForm(result=json.dumps),
    "LiteLlm": JsonForm(_FOR_LITELLM, _FOR_LITELLM),
    "AnthropicLlm": JsonForm(result=_spell_for_claude),
}
