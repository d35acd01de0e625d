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
    """Returns the model of an agent; None if ADK cannot name it without a call."""
    model = getattr(agent, "canonical_model", None)
    return model if isinstance(model, BaseLlm) else None


async def resolve_llm(run: InvocationContext) -> BaseLlm | None:
    """Returns the model that ADK calls for this agent."""
    resolve = getattr(run.agent, "canonical_model_async", None)
    if resolve is None:  # ADK 2.0 does not have it.
        return find_llm(run.agent)
    llm = await resolve(ReadonlyContext(run))
    return llm if isinstance(llm, BaseLlm) else None


class Client(NamedTuple):
    """What sends the requests of a model.

    Attributes:
        llm: The model as ADK calls it; of a `FallbackModel` the first that it asks.
        class_names: The names of its class and of those that it derives from.
    """

    llm: object
    class_names: list[str]

    @classmethod
    def of(cls, llm: object) -> Client:
        """Reads the client of a model; the model is None if nobody knows it."""
        names = [base.__name__ for base in type(llm).__mro__]
        if "FallbackModel" not in names:
            return cls(llm, names)

        models = getattr(llm, "models", [None])
        return cls.of(_make_model(models[0]))

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

    def set_output_tokens(self, config: types.GenerateContentConfig) -> int | None:
        """Returns the output limit that somebody has set; None if nobody has."""
        if config.max_output_tokens:
            return config.max_output_tokens

        limits: list[object] = []
        if "AnthropicLlm" in self.class_names:
            if "max_tokens" in getattr(self.llm, "model_fields_set", ()):
                limits.append(getattr(self.llm, "max_tokens", None))
        elif "LiteLlm" in self.class_names:
            arguments = self.litellm_arguments
            limits.append(arguments.get("max_completion_tokens"))
            limits.append(arguments.get("max_tokens"))

        for limit in limits:
            if isinstance(limit, int) and limit > 0:
                return limit
        return None

    def default_output_tokens(
        self, model: str, registry: ModelRegistry | None = None
    ) -> int | None:
        """Returns the output that the client asks for if nobody has set a limit.

        None means that it asks for no number. Anthropic's API wants one.

        Args:
            model: The name of the model.
            registry: Knows the output limits of models; None asks LiteLLM's table.
        """
        if "AnthropicLlm" in self.class_names:
            tokens = getattr(self.llm, "max_tokens", None)
            return tokens if isinstance(tokens, int) and tokens > 0 else None

        if "LiteLlm" in self.class_names:
            provider, _, name = model.lower().rpartition("/")
            if provider in _LITELLM_CLAUDE_PROVIDERS and "claude" in name:
                return resolve_output_limit(model, registry) or _LITELLM_OUTPUT_TOKENS
        return None


def json_form(llm: object) -> JsonForm:
    """Returns how a model's client spells JSON; compact if that is unknown."""
    for name in Client.of(llm).class_names:
        if name in _FORMS:
            return _FORMS[name]
    return COMPACT


def thinking_tokens(llm: object, config: types.GenerateContentConfig) -> int:
    """Returns how many tokens of thoughts a call asks for; 0 if it names no number.

    An output limit must be above this number. The number stands in the request's
    config, or in the arguments that `LiteLlm` was made with.
    """
    arguments = Client.of(llm).litellm_arguments
    thinking = arguments.get("thinking")
    if isinstance(thinking, Mapping):
        in_arguments = thinking.get("budget_tokens")
    else:
        effort = str(arguments.get("reasoning_effort"))
        in_arguments = _EFFORT_TOKENS.get(effort)

    in_config = config.thinking_config
    budget = in_config.thinking_budget if in_config else None
    asked: object = in_arguments if budget is None else budget
    return max(0, asked) if isinstance(asked, int) else 0


def answers_freely(request: LlmRequest, agent: object) -> bool:
    """Returns whether no built-in tool, schema or forced choice decides the answer."""
    config = request.config
    for tool in config.tools or ():
        settings = tool if isinstance(tool, types.Tool) else ()
        kinds = [name for name, value in settings if value is not None]
        if kinds != ["function_declarations"]:
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

    prompt = read_tokens(reported.prompt_token_count)
    prompt += read_tokens(reported.tool_use_prompt_token_count)
    written = read_tokens(reported.candidates_token_count)
    total = read_tokens(reported.total_token_count)
    cached = read_tokens(reported.cached_content_token_count)

    # `LiteLlm` reports thoughts as a part of the candidates, Gemini and Claude beside
    # them. The total includes them in both cases.
    if total and prompt:
        output = max(written, total - prompt)
    else:
        output = written + read_tokens(reported.thoughts_token_count)
    return Usage(max(prompt, cached), cached, output)


def list_models(llm: object) -> list[object]:
    """Returns the models that ADK's `FallbackModel` may ask; any other as it is."""
    if all(base.__name__ != "FallbackModel" for base in type(llm).__mro__):
        return [llm]
    return [_make_model(model) for model in getattr(llm, "models", [])]


def _make_model(model: object) -> object:
    """Returns a model of a `FallbackModel`, which newer ADK also takes as a name."""
    return LLMRegistry.new_llm(model) if isinstance(model, str) else model


def _spell_for_claude(response: dict[str, Any]) -> str:
    """Spells a result as ADK's Claude class does, in ASCII.

    It sends the texts of an MCP result, a value that stands alone under "result", or
    else the whole result.
    """
    content = response.get("content")
    if content and isinstance(content, list):
        return "\n".join(str(_read_block(block)) for block in content)
    if content and isinstance(content, str):
        return content

    value: object = response
    # ADK 2.0 sends this value also if others stand beside it.
    if response.keys() == {"result"} and response["result"] is not None:
        value = response["result"]
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _read_block(block: object) -> object:
    """Returns the text of a block of an MCP result, or a block of another type."""
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
