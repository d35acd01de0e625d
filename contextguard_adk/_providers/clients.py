"""ADK's model classes as clients: how they spell results, and what output they reserve.

A client is the object of ADK that sends a model's requests. The facts were read in ADK
2.0 to 2.13. A class is recognized by its name, because an import of the class would
load the SDK of its provider.
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

# The classes of ADK that `Client.name` tells apart.
_NAMED_CLIENTS = ("LiteLlm", "AnthropicLlm", "Gemini")

# Some models take a number of tokens for their thoughts, and not a `reasoning_effort`.
# To these LiteLLM sends this number for each effort.
_EFFORT_TOKENS = {
    "minimal": 128,
    "low": 1_024,
    "medium": 2_048,
    "high": 4_096,
    "xhigh": 8_192,
    "max": 16_384,
}

# The output limit that LiteLLM sends to Claude models that are not in LiteLLM's table.
_LITELLM_OUTPUT_TOKENS = 128_000

# The providers to whose Claude models LiteLLM always sends an output limit; "" stands
# for a name without a provider.
_LITELLM_CLAUDE_PROVIDERS = ("", "anthropic", "vertex_ai", "azure_ai")

# Modes of `FunctionCallingConfig` that let the model answer without a tool call.
_FREE_MODES = (None, "AUTO", "VALIDATED", "MODE_UNSPECIFIED")


def find_llm(agent: object) -> BaseLlm | None:
    """Returns the model object of an agent; None if only `resolve_llm` can find it."""
    model = getattr(agent, "canonical_model", None)
    return model if isinstance(model, BaseLlm) else None


def find_set_model(agent: object) -> object:
    """Returns the model that is set for an agent: an object or a name; else None.

    As in ADK, an agent without a model has the model of its nearest parent with one.
    Unlike `canonical_model` of ADK, this makes no client of a name, which may take
    seconds.
    """
    candidate = agent
    while candidate is not None:
        model: object = getattr(candidate, "model", None)
        if model:
            return model
        candidate = getattr(candidate, "parent_agent", None)
    return None


async def resolve_llm(run: InvocationContext) -> BaseLlm | None:
    """Returns the model object that ADK calls for a run's agent; None if unknown."""
    resolve = getattr(run.agent, "canonical_model_async", None)
    if resolve is None:  # ADK 2.0 does not have this method.
        llm: object = find_llm(run.agent)
    else:
        llm = await resolve(ReadonlyContext(run))  # Newer google-adk
    return llm if isinstance(llm, BaseLlm) else None


class Client(NamedTuple):
    """The object that sends the requests of a model.

    Attributes:
        llm: The model object that ADK calls. For a `FallbackModel` this is the first
            model that the `FallbackModel` asks.
        class_names: The names of the class of `llm` and of all base classes, the class
            itself first.
    """

    llm: object
    class_names: list[str]

    @classmethod
    def of(cls, llm: object) -> Client:
        """Returns the client of a model.

        Args:
            llm: The model object that ADK calls; None if the object is unknown.
        """
        class_names = [base.__name__ for base in type(llm).__mro__]
        if "FallbackModel" not in class_names:
            return cls(llm, class_names)

        # ADK makes no `FallbackModel` without models. If another class of this name has
        # no attribute `models`, the model is unknown.
        models = getattr(llm, "models", [None])
        first_model = _make_model(models[0])
        return cls.of(first_model)

    @property
    def name(self) -> str:
        """The first of `_NAMED_CLIENTS` among the `class_names`.

        For any other client this is the name of the class of `llm`.
        """
        for name in _NAMED_CLIENTS:
            if name in self.class_names:
                return name
        return self.class_names[0]

    @property
    def litellm_arguments(self) -> Mapping[str, Any]:
        """The arguments that a `LiteLlm` was made with; empty for other classes."""
        arguments = getattr(self.llm, "_additional_args", None)
        return arguments if isinstance(arguments, Mapping) else {}

    def chosen_output_tokens(self, config: types.GenerateContentConfig) -> int | None:
        """Returns the output limit that the user has chosen; None for no choice.

        A limit in the config of the request goes before a limit with which the user
        made the model object.

        Args:
            config: The config of the request.
        """
        if config.max_output_tokens:
            return config.max_output_tokens

        if "AnthropicLlm" in self.class_names:
            # `max_tokens` has a default, and the default is no choice of the user.
            fields_set_by_user = getattr(self.llm, "model_fields_set", ())
            if "max_tokens" in fields_set_by_user:
                return _positive_int(getattr(self.llm, "max_tokens", None))

        elif "LiteLlm" in self.class_names:
            for name in ("max_completion_tokens", "max_tokens"):
                limit_tokens = _positive_int(self.litellm_arguments.get(name))
                if limit_tokens is not None:
                    return limit_tokens
        return None

    def default_output_tokens(
        self, model: str, registry: ModelRegistry | None = None
    ) -> int | None:
        """Returns the output limit that the client sends if the user has chosen none.

        Only Anthropic's API demands an output limit, so a client sends a limit of its
        own only to Claude models. For other models the result is None.

        Args:
            model: The name of the model in the request.
            registry: Knows the output limits of models; None asks LiteLLM's table.
        """
        if "AnthropicLlm" in self.class_names:
            return _positive_int(getattr(self.llm, "max_tokens", None))
        if "LiteLlm" not in self.class_names:
            return None

        # "vertex_ai/claude-opus-4-7" -> "vertex_ai" and "claude-opus-4-7"
        # "claude-opus-4-7" -> "" and "claude-opus-4-7"
        provider, _, name = model.lower().rpartition("/")
        if provider in _LITELLM_CLAUDE_PROVIDERS and "claude" in name:
            return resolve_output_limit(model, registry) or _LITELLM_OUTPUT_TOKENS
        return None


def _positive_int(value: object) -> int | None:
    """Returns the value if the value is an int above 0, else None."""
    return value if isinstance(value, int) and value > 0 else None


def json_form(llm: object) -> JsonForm:
    """Returns how a model's client spells payloads as JSON.

    A payload is the arguments of a tool call, or the result of a tool. Unknown clients
    are assumed to spell payloads as compact JSON.

    Args:
        llm: The model object that ADK calls; None if the object is unknown.
    """
    # The nearest class of the client that has a form decides.
    for name in Client.of(llm).class_names:
        if name in _FORMS:
            return _FORMS[name]
    return COMPACT


def thinking_tokens(llm: object, config: types.GenerateContentConfig) -> int:
    """Returns how many tokens of thoughts a request asks for; 0 if no number is named.

    The first of these that is set decides:

    1. `thinking_budget` in the config of the request
    2. the argument `thinking` of `LiteLlm`, with its `budget_tokens`
    3. the argument `reasoning_effort` of `LiteLlm`

    Args:
        llm: The model object that ADK calls; None if the object is unknown.
        config: The config of the request.
    """
    arguments = Client.of(llm).litellm_arguments
    thinking_config = config.thinking_config
    thinking_argument = arguments.get("thinking")
    asked_tokens: object  # An argument may hold anything.
    if thinking_config and thinking_config.thinking_budget is not None:
        asked_tokens = thinking_config.thinking_budget
    elif isinstance(thinking_argument, Mapping):
        asked_tokens = thinking_argument.get("budget_tokens")
    else:
        effort = str(arguments.get("reasoning_effort"))
        asked_tokens = _EFFORT_TOKENS.get(effort)

    # Gemini's budget of -1 lets the model choose the number.
    if isinstance(asked_tokens, int) and asked_tokens > 0:
        return asked_tokens
    return 0


def answers_freely(request: LlmRequest, agent: object) -> bool:
    """Returns whether nothing in a request prevents an answer in plain text.

    The result is False if the request has one of these:

    - a tool that is no declared function, such as a search of the provider, because
      this tool may decide the form of the answer
    - a schema of the answer, in the config or as the agent's `output_schema`
    - a mode that makes the model call a tool

    Args:
        request: The request.
        agent: The agent that makes the request.
    """
    config = request.config
    for tool in config.tools or ():
        if not isinstance(tool, types.Tool):
            return False
        # A `types.Tool` has one field for each kind of tool. A Pydantic model yields
        # its fields.
        set_fields = [name for name, value in tool if value is not None]
        if set_fields != ["function_declarations"]:
            return False

    if config.response_schema or config.response_json_schema:
        return False
    if getattr(agent, "output_schema", None) is not None:
        return False

    # Without a mode the model chooses between a call and an answer.
    if not config.tool_config or not config.tool_config.function_calling_config:
        return True
    return config.tool_config.function_calling_config.mode in _FREE_MODES


def read_tokens(reported: int | None) -> int:
    """Returns a reported number of tokens; 0 for None and for a number below 0."""
    return max(0, reported or 0)


def read_usage(reported: types.GenerateContentResponseUsageMetadata | None) -> Usage:
    """Returns the tokens of a model call; zeros if the client reports nothing."""
    if reported is None:
        return Usage()

    message_tokens = read_tokens(reported.prompt_token_count)
    tool_use_tokens = read_tokens(reported.tool_use_prompt_token_count)
    sent_tokens = message_tokens + tool_use_tokens
    cached_tokens = read_tokens(reported.cached_content_token_count)
    # The cached tokens are a part of the prompt, even if the client reports no prompt.
    prompt_tokens = max(sent_tokens, cached_tokens)

    # Thoughts are output. `LiteLlm` counts thoughts as a part of the candidates. Gemini
    # and Claude count thoughts beside the candidates. The total always includes the
    # thoughts, so the total less the prompt is used if both are reported.
    candidate_tokens = read_tokens(reported.candidates_token_count)
    total_tokens = read_tokens(reported.total_token_count)
    if total_tokens > 0 and sent_tokens > 0:
        output_tokens = max(candidate_tokens, total_tokens - sent_tokens)
    else:
        thought_tokens = read_tokens(reported.thoughts_token_count)
        output_tokens = candidate_tokens + thought_tokens
    return Usage(prompt_tokens, cached_tokens, output_tokens)


def list_models(llm: object) -> list[object]:
    """Returns the model objects that may answer a request to a model.

    For ADK's `FallbackModel` the result has all models that it may ask, also over other
    ones. For any other model the result has only `llm`.

    Args:
        llm: The model object that ADK calls; None if the object is unknown.
    """
    class_names = [base.__name__ for base in type(llm).__mro__]
    if "FallbackModel" not in class_names:
        return [llm]

    models = list[object]()
    for model in getattr(llm, "models", []):
        models += list_models(_make_model(model))
    return models


def _make_model(model: object) -> object:
    """Returns the model object for an item of `FallbackModel.models`.

    Args:
        model: A model object or the name of a model.
    """
    # Newer google-adk also allows names. Older releases allow only model objects.
    return LLMRegistry.new_llm(model) if isinstance(model, str) else model


def _spell_for_claude(response: dict[str, Any]) -> str:
    """Spells a result of a tool as ADK's Claude class does.

    There are three forms of results:

    - {"content": [{"type": "text", "text": "18 °C"}]} -> 18 °C
      A result of MCP has a key "content" with a list of blocks, or with a text.
    - {"result": 18} -> 18
      ADK makes a dict with the key "result" from a value that is no dict.
    - {"degrees": 18} -> {"degrees": 18}
      Any other dict is sent as JSON.

    Args:
        response: The result, as the dict in ADK's `FunctionResponse`.
    """
    content = response.get("content")
    if content and isinstance(content, list):
        block_texts = [str(_read_block(block)) for block in content]
        return "\n".join(block_texts)
    if content and isinstance(content, str):
        return content

    # If a dict has other keys beside "result", ADK 2.0 sends only the value of
    # "result". Newer releases send the whole dict. The whole dict is taken here: for
    # ADK 2.0 the measured size may be too high, but never too low.
    is_wrapped = response.keys() == {"result"} and response["result"] is not None
    value: object = response["result"] if is_wrapped else response
    if isinstance(value, dict | list):
        return json.dumps(value)  # The class sends JSON in ASCII.
    return str(value)


def _read_block(block: object) -> object:
    """Returns the text of a block of an MCP result; else the block itself."""
    if isinstance(block, dict) and block.get("type") == "text":
        return block.get("text", block)
    return block


_FOR_LITELLM = partial(json.dumps, ensure_ascii=False)

# How clients spell payloads as JSON, by the names of their classes.
_FORMS = {
    # ADK's `Gemma3Ollama` derives from this class and from `LiteLlm`. This class comes
    # first in its base classes.
    "GemmaFunctionCallingMixin": JsonForm(result=json.dumps),
    "LiteLlm": JsonForm(_FOR_LITELLM, _FOR_LITELLM),
    "AnthropicLlm": JsonForm(result=_spell_for_claude),
}
