"""What providers say about a request that is too long, and what is read from it."""

import json
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest
from google.genai import errors as genai_errors
from hypothesis import given, settings
from hypothesis import strategies as st

from contextguard_adk.providers.overflow import (
    Overflow,
    parse_overflow,
)
from tests.growth import MAX_GROWTH, time_growth


def said(
    limit: int | None = None,
    prompt: int | None = None,
    output: int | None = None,
    is_sum: bool | None = None,
) -> Overflow:
    """Build what a message says; a named output counts against the limit."""
    return Overflow(limit, prompt, output, (output is not None) or bool(is_sum))


OVERFLOWS: dict[str, tuple[str, Overflow]] = {
    "openai-chat": (
        "This model's maximum context length is 128000 tokens. However, your messages "
        "resulted in 202868 tokens (202767 in the messages, 101 in the functions). "
        "Please reduce the length of the messages or functions.",
        said(128_000, 202_868),
    ),
    "openai-chat-completion": (
        "This model's maximum context length is 4097 tokens. However, you requested "
        "6031 tokens (5775 in the messages, 256 in the completion). Please reduce the "
        "length of the messages or completion.",
        said(4_097, 5_775, 256),
    ),
    "openai-chat-functions": (
        "This model's maximum context length is 8192 tokens. However, you requested "
        "8500 tokens (7000 in the messages, 500 in the functions, and 1000 in the "
        "completion). Please reduce the length of the messages, functions, or "
        "completion.",
        said(8_192, 7_500, 1_000),
    ),
    "openai-completions": (
        "This model's maximum context length is 4097 tokens, however you requested "
        "4569 tokens (3545 in your prompt; 1024 for the completion). Please reduce "
        "your prompt; or completion length.",
        said(4_097, 3_545, 1_024),
    ),
    "openai-no-completion": (
        "This model's maximum context length is 8192 tokens, however you requested "
        "8977 tokens (8977 in your prompt; 0 for the completion). Please reduce your "
        "prompt; or completion length.",
        said(8_192, 8_977),
    ),
    "openai-for-this-model": (
        "The maximum context length for this model is 16,385 tokens.",
        said(16_385),
    ),
    "openai-gpt5": (
        "Input tokens exceed the configured limit of 272000 tokens. Your messages "
        "resulted in 428548 tokens. Please reduce the length of the messages.",
        said(272_000, 428_548),
    ),
    "openai-gpt5-no-number": (
        "Input tokens exceed the configured limit of this model.",
        said(),
    ),
    "openai-responses": (
        "Your input exceeds the context window of this model. Please adjust your "
        "input and try again.",
        said(),
    ),
    "openai-code": ("Error code: 400 - {'code': 'context_length_exceeded'}", said()),
    "openai-string": (
        "Invalid 'messages[17].content': string too long. Expected a string with "
        "maximum length 1048576, but got a string with length 1744259 instead.",
        said(),
    ),
    "anthropic": (
        '{"type":"error","error":{"type":"invalid_request_error","message":"prompt is '
        'too long: 209303 tokens > 200000 maximum"}}',
        said(200_000, 209_303),
    ),
    "anthropic-one-over": (
        "prompt is too long: 200001 tokens > 200000 maximum",
        said(200_000, 200_001),
    ),
    "anthropic-gateway": ("Prompt is too long", said()),
    "anthropic-sum": (
        "input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000, "
        "decrease input length or `max_tokens` and try again",
        said(200_000, 178_959, 64_000),
    ),
    "anthropic-413": (
        '{"type":"error","error":{"type":"request_too_large","message":"Request '
        'exceeds the maximum size"}}',
        said(),
    ),
    "anthropic-stop-reason": ("model_context_window_exceeded", said()),
    "bedrock-claude": (
        "An error occurred (ValidationException) when calling the Converse operation: "
        "The model returned the following errors: prompt is too long: 227255 tokens > "
        "200000 maximum",
        said(200_000, 227_255),
    ),
    "bedrock-converse": (
        "The model returned the following errors: Input is too long for requested "
        "model.",
        said(),
    ),
    "bedrock-nova": (
        "The model returned the following errors: Input Tokens Exceeded: Number of "
        "input tokens exceeds maximum length. Please update the input to try again.",
        said(),
    ),
    "bedrock-max-length": (
        "Malformed input request: expected maxLength: 2097152, actual: 2300000, please "
        "reformat your input and try again.",
        said(),
    ),
    "bedrock-titan": (
        "400 Bad Request: Too many input tokens. Max input tokens: 8192, request input "
        "token count: 10564",
        said(8_192, 10_564),
    ),
    "bedrock-mantle": (
        '{"type":"validation_error","message":"prompt tokens (210000) exceed model '
        'maximum (200000)"}',
        said(200_000, 210_000),
    ),
    "gemini": (
        "The input token count (1066750) exceeds the maximum number of tokens allowed "
        "(1048575).",
        said(1_048_575, 1_066_750),
    ),
    "gemini-no-count": (
        "The input token count exceeds the maximum number of tokens allowed 1048576.",
        said(1_048_576),
    ),
    "gemini-bytes": (
        "Request payload size exceeds the limit: 20971520 bytes.",
        said(),
    ),
    "vertex": (
        "Unable to submit request because the input token count is 1251952 but model "
        "only supports up to 1048576. Reduce the input token count and try again.",
        said(1_048_576, 1_251_952),
    ),
    "mistral": (
        "Prompt contains 36864 tokens and 0 draft tokens, too large for model with "
        "32768 maximum context length",
        said(32_768, 36_864),
    ),
    "groq": (
        "{'error': {'message': 'Please reduce the length of the messages or "
        "completion.', 'type': 'invalid_request_error', 'param': 'messages', 'code': "
        "'context_length_exceeded'}}",
        said(),
    ),
    "cerebras": (
        "Please reduce the length of the messages or completion. Current length is "
        "42328 while limit is 40000",
        said(40_000, 42_328),
    ),
    "deepseek": (
        "This model's maximum context length is 131072 tokens. However, you requested "
        "131134 tokens (122942 in the messages, 8192 in the completion). Please reduce "
        "the length of the messages or completion.",
        said(131_072, 122_942, 8_192),
    ),
    "openrouter": (
        "This endpoint's maximum context length is 204800 tokens. However, you "
        "requested about 205432 tokens (81684 of text input, 3748 of tool input, "
        "120000 in the output). Please reduce the length of either one, or use the "
        '"middle-out" transform to compress your prompt automatically.',
        said(204_800, 85_432, 120_000),
    ),
    "openrouter-input": (
        "This endpoint's maximum context length is 16384 tokens. However, you "
        "requested about 94307 tokens (94307 of text input).",
        said(16_384, 94_307),
    ),
    "openrouter-poolside": (
        "Input length 140000 exceeds the maximum allowed input length of 131040 "
        "tokens.",
        said(131_040, 140_000),
    ),
    "vllm-total": (
        "This model's maximum context length is 131072 tokens. However, you requested "
        "351430 tokens. Please reduce the length of the messages or completion.",
        said(131_072, 351_430),
    ),
    "vllm-input": (
        "This model's maximum context length is 262144 tokens. However, your request "
        "has 1000010 input tokens. Please reduce the length of the input messages.",
        said(262_144, 1_000_010),
    ),
    "vllm-plus-max-tokens": (
        "This model's maximum context length is 2048 tokens. However, your request has "
        "800 input tokens plus 2045 'max_tokens'. Please reduce one or the other.",
        said(2_048, 800, 2_045),
    ),
    "vllm-max-tokens": (
        "'max_tokens' or 'max_completion_tokens' is too large: 32000. This model's "
        "maximum context length is 40960 tokens and your request has 14345 input "
        "tokens (32000 > 40960 - 14345).",
        said(40_960, 14_345, 32_000),
    ),
    "vllm-at-least": (
        "This model's maximum context length is 128000 tokens. However, you requested "
        "65535 output tokens and your prompt contains at least 62466 input tokens, for "
        "a total of at least 128001 tokens. Please reduce the length of the input "
        "prompt or the number of requested output tokens.",
        said(128_000, None, 65_535),
    ),
    "vllm-exact": (
        "This model's maximum context length is 128000 tokens. However, you requested "
        "65535 output tokens and your prompt contains 92466 input tokens, for a total "
        "of 158001 tokens.",
        said(128_000, 92_466, 65_535),
    ),
    "vllm-capped": (
        "You passed 99073 input tokens and requested 32000 output tokens. However, the "
        "model's context length is only 131072 tokens, resulting in a maximum input "
        "length of 99072 tokens. Please reduce the length of the input prompt.",
        said(131_072, None, 32_000),
    ),
    "vllm-capped-no-output": (
        "You passed 40961 input tokens and requested 0 output tokens. However, the "
        "model's context length is only 40960 tokens, resulting in a maximum input "
        "length of 40960 tokens.",
        said(40_960),
    ),
    "vllm-passed": (
        "You passed 210000 input tokens and requested 1024 output tokens. However, the "
        "model's context length is only 202752 tokens.",
        said(202_752, 210_000, 1_024),
    ),
    "vllm-decoder": (
        "The decoder prompt (length 66501) is longer than the maximum model length of "
        "40960. Make sure that `max_model_len` is no smaller than the number of text "
        "tokens.",
        said(40_960, 66_501),
    ),
    "vllm-prompt-length": (
        "Prompt length of 5016 is longer than the maximum model length of 4096.",
        said(4_096, 5_016),
    ),
    "vllm-0.6": (
        "The prompt (total length 25938) is too long to fit into the model (context "
        "length 4096). Make sure that `max_model_len` is no smaller than the number of "
        "text tokens plus multimodal tokens.",
        said(4_096, 25_938),
    ),
    "sglang": (
        "Requested token count exceeds the model's maximum context length of 32768 "
        "tokens. You requested a total of 70000 tokens: 6000 tokens from the input "
        "messages and 64000 tokens for the completion.",
        said(32_768, 6_000, 64_000),
    ),
    "sglang-input": (
        "Input length (160062 tokens) exceeds the maximum allowed length (59862 "
        "tokens). Use a shorter input or enable --allow-auto-truncate.",
        said(59_862, 160_062),
    ),
    "openai-compatible": (
        "Input length (265330) exceeds model's maximum context length (262144).",
        said(262_144, 265_330),
    ),
    "together": (
        "The input (345516 tokens) is longer than the model's context length (262144 "
        "tokens).",
        said(262_144, 345_516),
    ),
    "fireworks": (
        "The prompt is too long: 262377, model maximum context length: 262143",
        said(262_143, 262_377),
    ),
    "deepinfra": (
        "Requested input length 140000 exceeds maximum input length 131071",
        said(131_071, 140_000),
    ),
    "tgi": (
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8192. "
        "Given: 6204 `inputs` tokens and 2047 `max_new_tokens`",
        said(8_192, 6_204, 2_047),
    ),
    "tgi-input": (
        "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000",
        said(4_096, 5_000),
    ),
    "cohere": (
        "too many tokens: total number of tokens in the prompt cannot exceed 4081 - "
        "received 4292. Try using a shorter prompt, or enabling prompt truncating.",
        said(4_081, 4_292),
    ),
    "cohere-prediction": (
        "too many tokens: total number of tokens (prompt and prediction) cannot exceed "
        "2048 - received 6354. Try using a shorter prompt or a smaller max_tokens "
        "value.",
        said(2_048, is_sum=True),
    ),
    "cohere-by": (
        "too many tokens: size limit exceeded by 168512 tokens. Try using shorter or "
        "fewer inputs. The limit for this model is 132000 tokens.",
        said(132_000),
    ),
    "cohere-by-only": (
        "too many tokens: size limit exceeded by 11326 tokens. Try using shorter or "
        "fewer inputs, or setting prompt_truncation='AUTO'.",
        said(),
    ),
    "ai21": ("Prompt has too many tokens.", said()),
    "watsonx": (
        "Invalid input argument for Model 'meta-llama/llama-2-70b-chat': the number of "
        "input tokens 4098 cannot exceed the total tokens limit 4096 for this model",
        said(4_096, 4_098),
    ),
    "xai": (
        "This model's maximum prompt length is 131072 but the request contains 136973 "
        "tokens.",
        said(131_072, 136_973),
    ),
    "kimi": (
        "Invalid request: Your request exceeded model token limit: 262144 (requested: "
        "291351)",
        said(262_144, 291_351),
    ),
    "kimi-no-number": ("Your request exceeded model token limit", said()),
    "qwen": (
        "<400> InternalError.Algo.InvalidParameter: Range of input length should be "
        "[1, 129024]",
        said(129_024),
    ),
    "qwen-string": (
        "400 String value length (20054016) exceeds the maximum allowed (20000000, "
        "from `StreamReadConstraints.getMaxStringLength()`)",
        said(),
    ),
    "copilot": (
        '{"error":{"message":"prompt token count of 146270 exceeds the limit of '
        '128000","code":"model_max_prompt_tokens_exceeded"}}',
        said(128_000, 146_270),
    ),
    "minimax": ("invalid params, context window exceeds limit (2013)", said()),
    "zhipu": ('{"code":"1261","message":"Prompt exceeds max length"}', said()),
    "volcengine": (
        "Input length 1048826 exceeds the maximum length 1048566. Request id: 0217",
        said(1_048_566, 1_048_826),
    ),
    "volcengine-image": (
        "Total tokens of image and text exceed max message tokens. Request id: 0217",
        said(),
    ),
    "max-prompt-tokens": (
        "number of input tokens (167594) has exceeded max_prompt_tokens (163840) "
        "limit.",
        said(163_840, 167_594),
    ),
    "llamacpp": (
        "request (16385 tokens) exceeds the available context size (8192 tokens), try "
        "increasing it",
        said(8_192, 16_385),
    ),
    "llamacpp-fields": (
        '{"error":{"code":400,"message":"the request exceeds the available context '
        'size. try increasing the context size or enable context shift","type":'
        '"exceed_context_size_error","n_prompt_tokens":14429,"n_ctx":8192}}',
        said(8_192, 14_429),
    ),
    "llamacpp-fields-python": (
        "{'type': 'exceed_context_size_error', 'n_prompt_tokens': 14429, "
        "'n_ctx': 8192}",
        said(8_192, 14_429),
    ),
    "llamacpp-no-number": (
        "the request exceeds the available context size, try increasing it",
        said(),
    ),
    "llamacpp-input": (
        "input (70000 tokens) is larger than the max context size (65536 tokens). "
        "skipping",
        said(65_536, 70_000),
    ),
    "llamacpp-input-no-number": (
        "input is larger than the max context size. skipping",
        said(),
    ),
    "llamacpp-generating": ("Context size has been exceeded.", said()),
    "llama-cpp-python": (
        "Requested tokens (2285) exceed context window of 2048",
        said(2_048, 2_285),
    ),
    "ollama": ("prompt too long; exceeded max context length by 1200 tokens", said()),
    "ollama-embedding": ("the input length exceeds the context length", said()),
    "lm-studio": (
        "The number of tokens to keep from the initial prompt is greater than the "
        "context length. Try to load the model with a larger context length, or "
        "provide a shorter input",
        said(),
    ),
    "lm-studio-numbers": (
        "The number of tokens to keep from the initial prompt is greater than the "
        "context length (n_keep: 13055>= n_ctx: 4096). Try to load the model with a "
        "larger context length, or provide a shorter input.",
        said(4_096),
    ),
    "lm-studio-keep": (
        "Trying to keep the first 111490 tokens when context the overflows. However, "
        "the model is loaded with context length of only 32768 tokens, which is not "
        "enough.",
        said(32_768),
    ),
    "nginx": ("<html><h1>413 Request Entity Too Large</h1></html>", said()),
    "litellm-class": ("litellm.ContextWindowExceededError: it broke off", said()),
}

REFUSALS: dict[str, str] = {
    "bedrock-throttling": "Too many tokens, please wait before trying again.",
    "bedrock-throttling-day": (
        "An error occurred (ThrottlingException) when calling the Converse operation "
        "(reached max retries: 4): Too many tokens per day, please wait before trying "
        "again."
    ),
    "groq-tpm": (
        "Request too large for model `llama-3.1-8b-instant` in organization `org` "
        "service tier `on_demand` on tokens per minute (TPM): Limit 6000, Requested "
        "6294, please reduce your message size and try again."
    ),
    "openai-tpm": (
        "Request too large for gpt-4o in organization org on tokens per min (TPM): "
        "Limit 30000, Requested 342389. The input or output tokens must be reduced in "
        "order to run successfully."
    ),
    "openai-code": "{'type': 'tokens', 'code': 'rate_limit_exceeded'}",
    "litellm-class": "litellm.RateLimitError: OpenAIException - slow down",
    "anthropic-extra-usage": "Extra usage is required for long context requests.",
    "anthropic-rate": (
        "This request would exceed your organization\u2019s rate limit of 30,000 input "
        "tokens per minute. Please reduce the prompt length or the maximum tokens "
        "requested."
    ),
    "anthropic-requests": "would exceed your rate limit of 50 requests per minute",
    "gemini-quota": (
        "429 RESOURCE_EXHAUSTED. {'error': {'message': 'Quota exceeded for metric: "
        "generate_content_input_token_count, limit: 250000'}}"
    ),
    "gemini-output": (
        "Unable to submit request because it has a maxOutputTokens value of 655360 but "
        "the supported range is from 1 (inclusive) to 8193 (exclusive). Update the "
        "value and try again."
    ),
    "output-limit": "max_tokens (10000) exceeds the limit of 8192",
    "output-supported": "max_completion_tokens is 9000, model only supports up to 8192",
    "cohere-output": (
        "too many tokens: max tokens must be less than or equal to 4096, the maximum "
        "output for this model - received 8192."
    ),
    "http-429": "HTTP 429: too many requests",
}

UNRELATED: dict[str, str] = {
    "empty": "",
    "auth": "Error code: 401 - Incorrect API key provided",
    "overloaded": "Overloaded",
    "timeout": "Request timed out after 60000 ms",
    "anthropic-output": (
        "max_tokens: 64000 > 32000, which is the maximum allowed number of output "
        "tokens for claude-opus-4"
    ),
    "openai-output": (
        "max_tokens is too large: 65536. This model supports at most 16384 completion "
        "tokens, whereas you provided 65536."
    ),
    "databricks-output": (
        "max_tokens (10000) cannot exceed 8192. Please reduce the length of max output "
        "tokens generated."
    ),
    "qwen-output": "Range of max_tokens should be [1, 8192]",
    "bedrock-output": (
        "The maximum tokens you requested exceeds the model limit of 32768"
    ),
    "openrouter-credits": (
        "This request requires more credits, or fewer max_tokens. You requested up to "
        "65536 tokens, but can only afford 1234."
    ),
    "openai-call-id": (
        "Invalid 'input[95].call_id': string too long. Expected a string with maximum "
        "length 64, but got a string with length 116 instead."
    ),
    "bedrock-short-text": (
        "Malformed input request: expected maxLength: 2048, actual: 2100"
    ),
    "images": "The request has 12 images, but model only supports up to 10 images",
    "image-bytes": "The image exceeds the limit of 5242880 bytes",
    "tools": "The number of tools exceeds the limit of 128 tools",
}


def cases(table: dict[str, Any]) -> pytest.MarkDecorator:
    """Run a test once for each row, named after its provider."""
    return pytest.mark.parametrize("case", table.values(), ids=table.keys())


class StatusError(Exception):
    """An SDK's error: status, message and body, as OpenAI's and Anthropic's have."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.message = text
        self.status_code = status
        self.body = {"message": text}
        self.request = httpx.Request("POST", "https://provider.invalid/v1")
        self.response = httpx.Response(status, request=self.request, text=text)


class HoldingError(Exception):
    """An error with the attributes that it is given and nothing in its own text."""

    def __init__(self, **attributes: object) -> None:
        super().__init__("it broke")
        self.__dict__.update(attributes)


@pytest.fixture(scope="module")
def litellm() -> Iterator[ModuleType]:
    """LiteLLM as an offline program imports it, without its advertisements."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        warnings.simplefilter("ignore", DeprecationWarning)
        import litellm

        patch.setattr(litellm, "suppress_debug_info", True)
        yield litellm


def map_error(litellm: ModuleType, provider: str, error: Exception) -> Exception:
    """Return what LiteLLM raises for a provider's error."""
    mapping = litellm.litellm_core_utils.exception_mapping_utils
    with pytest.raises(Exception) as raised:  # noqa: PT011
        mapping.exception_type(
            model="some-model", original_exception=error, custom_llm_provider=provider
        )
    return raised.value


class TestTexts:
    """What a bare text says."""

    @cases(OVERFLOWS)
    def test_overflow_is_read(self, case: tuple[str, Overflow]) -> None:
        """Each provider's words give its limit and its counts."""
        text, expected = case
        assert parse_overflow(Exception(text)) == expected

    @cases(OVERFLOWS)
    def test_form_does_not_matter(self, case: tuple[str, Overflow]) -> None:
        """Capitals, line breaks, nested JSON and its escapes change nothing."""
        text, expected = case
        nested = json.dumps({"error": json.dumps({"message": text})})
        for_html = json.dumps(text).replace(">", r"\u003e").replace("'", r"\u0027")
        for form in (text.upper(), text.replace(" ", "\n  "), nested, for_html):
            assert parse_overflow(Exception(form)) == expected

    @cases(REFUSALS | UNRELATED)
    def test_other_failure_is_no_overflow(self, case: str) -> None:
        """Rate limits, quotas and limits on the output or on a field do not match."""
        assert parse_overflow(Exception(case)) is None

    @cases(REFUSALS)
    def test_echoed_prompt_makes_no_overflow(self, case: str) -> None:
        """A rate limit that echoes any provider's overflow text stays a rate limit."""
        for text, _ in OVERFLOWS.values():
            assert parse_overflow(Exception(f"{case} Your request: {text}")) is None
            assert parse_overflow(Exception(f"{text} caused: {case}")) is None

    @pytest.mark.parametrize(
        ("number", "limit"),
        [
            ("200,000", 200_000),
            ("200_000", 200_000),
            ("1,048,576,", 1_048_576),
            ("256", 256),
            ("255", None),
            ("0", None),
            ("128k", None),
            ("100000000", 100_000_000),
            ("100000001", None),
            ("9" * 40, None),
        ],
    )
    def test_limit_must_be_plausible(self, number: str, limit: int | None) -> None:
        """A limit under 256 or over 100 million is unknown, and still an overflow."""
        text = f"maximum context length is {number} tokens"
        assert parse_overflow(Exception(text)) == said(limit)

    def test_two_limits_are_none(self) -> None:
        """Where one wording names two limits, one is a quotation, and neither holds."""
        text = "maximum context length is 300 tokens. maximum context length is 8192"
        assert parse_overflow(Exception(text)) == said()

    def test_repeated_limit_holds(self) -> None:
        """A wrapper that repeats the message in its own format changes nothing."""
        text = "maximum context length is 8,192. Error: maximum context length is 8192"
        assert parse_overflow(Exception(text)) == said(8_192)

    def test_far_counts_are_not_read(self) -> None:
        """A count far from the limit belongs to something else."""
        text = (
            f"maximum prompt length is 8192 {'x ' * 400} request contains 9000 tokens"
        )
        assert parse_overflow(Exception(text)) == said(8_192)

    def test_output_over_total_gives_no_prompt(self) -> None:
        """Counts that contradict each other give no prompt count."""
        text = "maximum context length is 8192; requested 9 tokens (99 in the output)"
        assert parse_overflow(Exception(text)) == said(8_192, None, 99)

    @pytest.mark.parametrize("is_first", [True, False])
    def test_long_echo_hides_nothing(self, is_first: bool) -> None:
        """The message is found before or after a megabyte of echoed request."""
        text, expected = OVERFLOWS["anthropic"]
        echo = "word " * 200_000
        long = f"{text} {echo}" if is_first else f"{echo} {text}"
        assert parse_overflow(Exception(long)) == expected

    def test_middle_of_long_text_is_not_read(self) -> None:
        """What stands amid a very long text is the request's, not the provider's."""
        text, _ = OVERFLOWS["anthropic"]
        assert parse_overflow(Exception("x " * 20_000 + text + " x" * 20_000)) is None

    @pytest.mark.parametrize(
        "unit",
        [
            "1",
            "1,",
            "9_",
            "(1 tokens) ",
            "input length 1 exceeds the maximum ",
            "max_tokens ",
            "too many tokens ",
            "size limit exceeded by 1 tokens ",
            "maximum context length is ",
            "maximum context length is 999 ",
            "requested 1 tokens (",
            "\\",
            r"\u003e",
            "İ",
        ],
    )
    def test_hostile_text_takes_linear_time(self, unit: str) -> None:
        """A wording that starts again and again is read in proportion to its length."""

        def repeat(chars: int) -> Exception:
            return Exception(unit * (chars // len(unit)))

        assert time_growth(repeat, parse_overflow, 100_000) < MAX_GROWTH

    @settings(deadline=None)
    @given(st.text())
    def test_any_text_is_read(self, text: str) -> None:
        """No text at all makes the reader fail."""
        parse_overflow(Exception(text))

    @settings(deadline=None)
    @given(st.lists(st.sampled_from([text for text, _ in OVERFLOWS.values()])))
    def test_no_digits_no_numbers(self, texts: list[str]) -> None:
        """A text without digits gives no number."""
        bare = "".join(c for c in " ".join(texts) if not c.isdigit())
        overflow = parse_overflow(Exception(bare))
        assert overflow is None or overflow == said(
            is_sum=overflow.is_input_plus_output
        )

    @settings(deadline=None)
    @given(
        st.sampled_from([text for text, _ in OVERFLOWS.values()]),
        st.sampled_from(sorted(REFUSALS.values())),
        st.text(max_size=50),
    )
    def test_refusal_always_wins(self, text: str, refusal: str, between: str) -> None:
        """Whatever stands between them, a refusal wins over an overflow."""
        assert parse_overflow(Exception(f"{text} {between} {refusal}")) is None


class TestErrors:
    """What an error says, by itself and through what it is linked to."""

    @cases(OVERFLOWS)
    def test_plain_error(self, case: tuple[str, Overflow]) -> None:
        """The text of an exception is enough."""
        text, expected = case
        assert parse_overflow(Exception(text)) == expected

    @cases(OVERFLOWS)
    def test_genai_error(self, case: tuple[str, Overflow]) -> None:
        """Google's client error says it in its details."""
        text, expected = case
        details = {
            "error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT"}
        }
        assert parse_overflow(genai_errors.ClientError(400, details)) == expected

    @pytest.mark.parametrize(
        "provider", ["openai", "anthropic", "bedrock", "vertex_ai", "azure", "ollama"]
    )
    @cases(OVERFLOWS)
    def test_litellm_error(
        self, litellm: ModuleType, provider: str, case: tuple[str, Overflow]
    ) -> None:
        """Whatever class LiteLLM maps the error to, it is the same overflow."""
        text, expected = case
        assert (
            parse_overflow(map_error(litellm, provider, StatusError(text))) == expected
        )

    @pytest.mark.parametrize(
        ("provider", "row"),
        [
            ("openai", "openai-chat"),
            ("anthropic", "anthropic"),
            ("bedrock", "bedrock-converse"),
            ("gemini", "gemini"),
            ("cohere", "cohere"),
        ],
    )
    def test_litellm_overflow_class(
        self, litellm: ModuleType, provider: str, row: str
    ) -> None:
        """LiteLLM's own class for it keeps the numbers."""
        text, expected = OVERFLOWS[row]
        error = map_error(litellm, provider, StatusError(text))
        assert isinstance(error, litellm.ContextWindowExceededError)
        assert parse_overflow(error) == expected

    @cases(OVERFLOWS)
    def test_litellm_mid_stream(
        self, litellm: ModuleType, case: tuple[str, Overflow]
    ) -> None:
        """An error in mid-stream is found behind LiteLLM's wrapper."""
        text, expected = case
        wrapped = litellm.exceptions.MidStreamFallbackError(
            message="the stream broke off",
            model="some-model",
            llm_provider="openai",
            original_exception=StatusError(text),
        )
        assert parse_overflow(wrapped) == expected

    @cases(OVERFLOWS)
    def test_litellm_connection_error(
        self, litellm: ModuleType, case: tuple[str, Overflow]
    ) -> None:
        """A connection error is looked behind."""
        text, expected = case
        wrapped = litellm.APIConnectionError(
            message="connection error", llm_provider="openai", model="some-model"
        )
        wrapped.__cause__ = StatusError(text)
        assert parse_overflow(wrapped) == expected

    @cases(REFUSALS | UNRELATED)
    def test_other_failure_is_no_overflow(self, litellm: ModuleType, case: str) -> None:
        """Another failure is none in any wrapping, whatever the wrapper quotes."""
        mapped = map_error(litellm, "openai", StatusError(case))
        mid_stream = litellm.exceptions.MidStreamFallbackError(
            message="the stream broke off after 128000 tokens",
            model="some-model",
            llm_provider="openai",
            original_exception=StatusError(case),
        )
        chained = Exception("no answer to a request of 300000 tokens > 200000")
        chained.__cause__ = StatusError(case)
        group = ExceptionGroup("2 of 131072", [Exception(case), ValueError("8192")])
        for error in (Exception(case), mapped, mid_stream, chained, group):
            assert parse_overflow(error) is None

    @cases(REFUSALS)
    def test_quoting_wrapper_makes_no_overflow(self, case: str) -> None:
        """A wrapper that quotes the prompt does not overrule its cause."""
        text, _ = OVERFLOWS["anthropic"]
        wrapper = Exception(f"no answer to {text!r}")
        wrapper.__cause__ = ExceptionGroup("all failed", [Exception(case)])
        assert parse_overflow(wrapper) is None

    @pytest.mark.parametrize("name", ["status_code", "code", "status"])
    @pytest.mark.parametrize("status", [429, "429"])
    def test_status_429_is_a_rate_limit(self, name: str, status: object) -> None:
        """With status 429 no text makes an overflow."""
        text, _ = OVERFLOWS["anthropic"]
        assert parse_overflow(HoldingError(**{name: status, "message": text})) is None

    @pytest.mark.parametrize(
        "attributes",
        [
            {"message": OVERFLOWS["anthropic"][0]},
            {"body": OVERFLOWS["anthropic"][0]},
            {"body": OVERFLOWS["anthropic"][0].encode()},
            {"body": {"error": {"message": OVERFLOWS["anthropic"][0]}}},
            {"details": [{"error": OVERFLOWS["anthropic"][0]}]},
            {"response": httpx.Response(400, text=OVERFLOWS["anthropic"][0])},
        ],
        ids=["message", "body", "bytes", "nested", "details", "response"],
    )
    def test_attributes_are_read(self, attributes: dict[str, object]) -> None:
        """What an SDK keeps beside the text is read too."""
        assert parse_overflow(HoldingError(**attributes)) == OVERFLOWS["anthropic"][1]

    def test_code_is_read(self) -> None:
        """OpenAI's error code alone says it."""
        assert parse_overflow(HoldingError(code="context_length_exceeded")) == said()

    def test_unread_response_is_left_alone(self) -> None:
        """A response that was not read is not read now, be it httpx's or requests'."""

        class RequestsResponse:
            _content = False

            @property
            def text(self) -> str:
                pytest.fail("this would go to the network")

        streaming = httpx.Response(400, stream=httpx.ByteStream(b"prompt is too long"))
        for response in (RequestsResponse(), streaming):
            assert parse_overflow(HoldingError(response=response)) is None

    def test_body_can_refuse_the_text(self) -> None:
        """Text and body are one message."""
        error = StatusError(OVERFLOWS["anthropic"][0])
        error.body = {"message": REFUSALS["groq-tpm"]}
        assert parse_overflow(error) is None

    def test_numbers_of_the_cause_are_kept(self) -> None:
        """A wrapper that has lost the numbers takes them from its cause."""
        text, expected = OVERFLOWS["anthropic-sum"]
        wrapper = Exception("Prompt is too long")
        wrapper.__cause__ = Exception(text)
        assert parse_overflow(wrapper) == expected

    def test_own_numbers_come_first(self) -> None:
        """Where both name as much, the outer error is believed."""
        wrapper = Exception(OVERFLOWS["anthropic"][0])
        wrapper.__cause__ = Exception(OVERFLOWS["gemini"][0])
        assert parse_overflow(wrapper) == OVERFLOWS["anthropic"][1]

    def test_group_member_is_found(self) -> None:
        """One overflow among the members of nested groups is enough."""
        text, expected = OVERFLOWS["gemini"]
        inner = BaseExceptionGroup("inner", [KeyboardInterrupt(), Exception(text)])
        outer = BaseExceptionGroup("outer", [Exception(REFUSALS["groq-tpm"]), inner])
        assert parse_overflow(outer) == expected

    def test_handled_error_is_found(self) -> None:
        """An error raised without `from` is looked behind."""
        text, expected = OVERFLOWS["gemini"]
        error = ValueError("no answer")
        error.__context__ = Exception(text)
        assert parse_overflow(error) == expected

    def test_disowned_error_is_not_read(self) -> None:
        """What was raised `from None` stands for itself."""
        error = ValueError("no answer")
        error.__context__ = Exception(OVERFLOWS["gemini"][0])
        error.__suppress_context__ = True
        assert parse_overflow(error) is None

    def test_error_outranks_what_was_handled(self) -> None:
        """A fallback's own failure counts, not the one that led to the fallback."""
        limited, overflow = Exception(REFUSALS["groq-tpm"]), OVERFLOWS["gemini"]
        fallback = Exception(overflow[0])
        fallback.__context__ = limited
        assert parse_overflow(fallback) == overflow[1]
        limited.__context__ = Exception(overflow[0])
        assert parse_overflow(limited) is None

    def test_cycle_ends(self) -> None:
        """Errors that cause each other are read once."""
        first, second = Exception("first"), Exception("second")
        first.__cause__, second.__cause__ = second, first
        assert parse_overflow(first) is None

    @pytest.mark.parametrize(("depth", "is_found"), [(31, True), (32, False)])
    def test_chain_is_bounded(self, depth: int, is_found: bool) -> None:
        """Thirty-two errors of a chain are read, and no more."""
        error = Exception(OVERFLOWS["gemini"][0])
        for _ in range(depth):
            wrapper = Exception("wrapper")
            wrapper.__cause__ = error
            error = wrapper
        assert (parse_overflow(error) is not None) is is_found

    def test_hostile_error_is_survived(self) -> None:
        """An error that fails in every way when it is read is no overflow."""

        class HostileError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

            def __getattribute__(self, name: str) -> Any:
                raise RuntimeError("no attributes")

        assert parse_overflow(HostileError()) is None

    def test_hostile_attributes_are_survived(self) -> None:
        """Attributes that fail when they are looked at do not hide the others."""

        class Hostile:
            __hash__ = None  # type: ignore[assignment]

            @property  # type: ignore[misc]
            def __class__(self) -> Any:
                raise RuntimeError("no class")

            def __eq__(self, other: object) -> bool:
                raise RuntimeError("no comparison")

        class HostileText(str):
            def __str__(self) -> str:
                return HostileText("prompt is too long")

            def __getitem__(self, key: object) -> str:
                raise RuntimeError("no characters")

        hostile = Hostile()
        error = HoldingError(
            status_code=hostile,
            original_exception=hostile,
            exceptions=[hostile],
            details=hostile,
            body=HostileText(),
        )
        assert parse_overflow(error) == said()

    @settings(deadline=None)
    @given(
        st.one_of(
            st.none(),
            st.text(),
            st.binary(),
            st.integers(),
            st.lists(st.text()),
            st.dictionaries(st.text(), st.lists(st.binary())),
        ),
        st.sampled_from(
            ["message", "body", "code", "details", "response", "exceptions", "status"]
        ),
    )
    def test_any_attribute_is_read(self, value: object, name: str) -> None:
        """No attribute of any shape makes the reader fail."""
        parse_overflow(HoldingError(**{name: value}))

    def test_other_base_exceptions_are_read(self) -> None:
        """An exception that is no `Exception` is read as well."""
        assert parse_overflow(KeyboardInterrupt()) is None


def test_overflow_is_immutable() -> None:
    """What was read cannot be changed."""
    with pytest.raises(AttributeError):
        said(8_192).limit_tokens = 1  # type: ignore[misc]
