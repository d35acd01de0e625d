"""ADK's model classes as clients: how they spell results, and what they reserve.

A client is the object of ADK that sends a model's requests. The facts were read in ADK
2.0 to 2.13. A class is recognized by its name, because an import would load the SDK of
its provider.
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

# The tokens of thoughts that LiteLLM sends for each `reasoning_effort`, to models that
# take a number.
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

# Modes of `FunctionCallingConfig` that let the model answer without a tool call.
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
        class_names: The names of its class and of all base classes.
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

        # ADK makes no `FallbackModel` without models.
        models = getattr(llm, "models", [None])
        first_model = _make_model(models[0])
        return cls.of(first_model)

    @property
    def name(self) -> str:
        """One of `_NAMED_CLIENTS`; for any other client the name of its own class."""
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

        if "AnthropicLlm" in self.class_names:
            # The field has a default, which is no choice of the user.
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

        Only Anthropic's API demands a limit. So a client sends one to Claude alone. For
        other models the result is None.

        Args:
            model: The name of the model.
            registry: Knows the output limits of models; None asks LiteLLM's table.
        """
        if "AnthropicLlm" in self.class_names:
            return _positive_int(getattr(self.llm, "max_tokens", None))
        if "LiteLlm" not in self.class_names:
            return None

        # "vertex_ai/claude-opus-4-1" -> "vertex_ai", "claude-opus-4-1"
        provider, _, name = model.lower().rpartition("/")
        if provider in _LITELLM_CLAUDE_PROVIDERS and "claude" in name:
            return resolve_output_limit(model, registry) or _LITELLM_OUTPUT_TOKENS
        return None


def _positive_int(value: object) -> int | None:
    """Returns a value if it is an int above 0, else None."""
    return value if isinstance(value, int) and value > 0 else None


def json_form(llm: object) -> JsonForm:
    """Returns how a model's client spells payloads as JSON.

    A payload is the arguments of a call, or the result of a tool. Unknown clients are
    assumed to spell payloads as compact JSON.
    """
    for name in Client.of(llm).class_names:
        if name in _FORMS:
            return _FORMS[name]
    return COMPACT


def thinking_tokens(llm: object, config: types.GenerateContentConfig) -> int:
    """Returns how many tokens of thoughts a call asks for; 0 if it names no number.

    The first of these that is set decides:

    1. `thinking_budget` in the request's config
    2. `budget_tokens` in the argument `thinking` of `LiteLlm`
    3. the argument `reasoning_effort` of `LiteLlm`
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

    # Gemini's -1 leaves the number to the model.
    if isinstance(asked_tokens, int) and asked_tokens > 0:
        return asked_tokens
    return 0


def answers_freely(request: LlmRequest, agent: object) -> bool:
    """Returns whether the model is sure to be free to answer in plain text.

    These may keep it from a plain answer:

    - a tool that is no declared function, because it may decide the form of the answer
    - a schema of the answer
    - the order to call a tool
    """
    config = request.config
    for tool in config.tools or ():
        if not isinstance(tool, types.Tool):
            return False
        # A Pydantic model yields its fields. Here each field is a kind of tool.
        set_fields = [name for name, value in tool if value is not None]
        if set_fields != ["function_declarations"]:
            return False

    if config.response_schema or config.response_json_schema:
        return False
    if getattr(agent, "output_schema", None) is not None:
        return False

    if not config.tool_config or not config.tool_config.function_calling_config:
        return True
    return config.tool_config.function_calling_config.mode in _FREE_MODES


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
    # A prompt is at least as large as its cached part.
    prompt_tokens = max(sent_tokens, cached_tokens)

    # `LiteLlm` counts thoughts among the candidates, Gemini and Claude apart from the
    # candidates. The total includes thoughts in both cases, so it is used if possible.
    candidate_tokens = read_tokens(reported.candidates_token_count)
    total_tokens = read_tokens(reported.total_token_count)
    if total_tokens > 0 and sent_tokens > 0:
        output_tokens = max(candidate_tokens, total_tokens - sent_tokens)
    else:
        thought_tokens = read_tokens(reported.thoughts_token_count)
        output_tokens = candidate_tokens + thought_tokens
    return Usage(prompt_tokens, cached_tokens, output_tokens)


def list_models(llm: object) -> list[object]:
    """Returns the models that may answer a request to a model.

    For ADK's `FallbackModel` these are all its models, for any other only itself.
    """
    class_names = [base.__name__ for base in type(llm).__mro__]
    if "FallbackModel" not in class_names:
        return [llm]
    return [_make_model(model) for model in getattr(llm, "models", [])]


def _make_model(model: object) -> object:
    """Returns a model of a `FallbackModel`."""
    # Newer google-adk: such a model may be given by its name.
    return LLMRegistry.new_llm(model) if isinstance(model, str) else model


def _spell_for_claude(response: dict[str, Any]) -> str:
    """Spells a result of a tool as ADK's Claude class does.

    - {"content": [{"type": "text", "text": "18 °C"}]}, an MCP result -> 18 °C
    - {"result": 18}, because ADK wraps values so that are no dicts -> 18
    - {"degrees": 18}, as any other dict -> {"degrees": 18}
    """
    content = response.get("content")
    if content and isinstance(content, list):
        block_texts = [str(_read_block(block)) for block in content]
        return "\n".join(block_texts)
    if content and isinstance(content, str):
        return content

    # If there are other keys beside "result", ADK 2.0 leaves them out. Newer releases
    # send all keys. So for ADK 2.0 the measure may be too high, but not too low.
    is_wrapped = response.keys() == {"result"} and response["result"] is not None
    value: object = response["result"] if is_wrapped else response
    if isinstance(value, dict | list):
        return json.dumps(value)  # The class sends JSON in ASCII.
    return str(value)


def _read_block(block: object) -> object:
    """Returns the text of a block of an MCP result; a block without text as it is."""
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
