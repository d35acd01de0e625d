"""What providers say about a request that is too long, and what is read from it."""

import csv
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
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


def read_messages(kind: str) -> dict[str, tuple[str, Overflow]]:
    """Messages that providers, servers and gateways send, and what they say."""
    found = {}
    with MESSAGES.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            limit, prompt, output = (int(row[name] or 0) or None for name in COUNTS)
            meaning = Overflow(limit, prompt, output, bool(row["sum"]))
            if row["kind"] == kind:
                found[row["name"]] = (row["message"], meaning)
    return found


MESSAGES = Path(__file__).parent / "overflow_messages.tsv"
COUNTS = ("limit", "prompt", "output")
OVERFLOWS = read_messages("overflow")
REFUSALS = {name: text for name, (text, _) in read_messages("refusal").items()}
UNRELATED = {name: text for name, (text, _) in read_messages("unrelated").items()}


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
            *("1", "9_", "(1 tokens) ", "max_tokens ", "too many tokens ", "\\", "İ"),
            "input length 1 exceeds the maximum ",
            "size limit exceeded by 1 tokens ",
            "maximum context length is 999 ",
            "requested 1 tokens (",
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

    def test_genai_error(self) -> None:
        """Google's client error says it in its details."""
        text, expected = OVERFLOWS["gemini"]
        details = {
            "error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT"}
        }
        assert parse_overflow(genai_errors.ClientError(400, details)) == expected

    @cases(OVERFLOWS)
    def test_litellm_error(
        self, litellm: ModuleType, case: tuple[str, Overflow]
    ) -> None:
        """Whatever class LiteLLM maps the error to, it is the same overflow."""
        text, expected = case
        mapped = map_error(litellm, "openai", StatusError(text))
        assert parse_overflow(mapped) == expected

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

    def test_litellm_wrappers_are_looked_behind(self, litellm: ModuleType) -> None:
        """An error in mid-stream, and the cause of a connection error, are found."""
        text, expected = OVERFLOWS["anthropic"]
        mid_stream = litellm.exceptions.MidStreamFallbackError(
            message="the stream broke off",
            model="some-model",
            llm_provider="openai",
            original_exception=StatusError(text),
        )
        unconnected = litellm.APIConnectionError(
            message="connection error", llm_provider="openai", model="some-model"
        )
        unconnected.__cause__ = StatusError(text)
        assert parse_overflow(mid_stream) == parse_overflow(unconnected) == expected

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

    @pytest.mark.parametrize(
        ("name", "status"), [("status_code", 429), ("code", "429"), ("status", 429)]
    )
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
