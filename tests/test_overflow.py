"""What providers say about a request that is too long, and what is read from it."""

import csv
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from google.genai import errors as genai_errors
from google.genai import types

from contextguard_adk._providers.calling import is_transient
from contextguard_adk._providers.overflow import Overflow, parse_overflow
from tests.builders import user
from tests.growth import MAX_GROWTH, time_growth

MESSAGES = Path(__file__).parent / "overflow_messages.tsv"
COUNTS = ("limit", "prompt", "output")


def said(
    limit: int | None = None, prompt: int | None = None, output: int | None = None
) -> Overflow:
    """What a message says; a named output counts against the limit."""
    return Overflow(limit, prompt, output, output is not None)


def read_messages(kind: str) -> dict[str, tuple[str, Overflow]]:
    """Messages that providers, servers and gateways send, and what they say."""
    found = {}
    with MESSAGES.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            limit, prompt, output = (int(row[name] or 0) or None for name in COUNTS)
            flags = bool(row["sum"]), bool(row["bytes"])
            meaning = Overflow(limit, prompt, output, *flags)
            if row["kind"] == kind:
                found[row["name"]] = (row["message"], meaning)

    return found


OVERFLOWS = read_messages("overflow")
REFUSALS = {name: text for name, (text, _) in read_messages("refusal").items()}
UNRELATED = {name: text for name, (text, _) in read_messages("unrelated").items()}
TEXT, MEANING = OVERFLOWS["anthropic"]
REFUSAL = REFUSALS["openai-used"]
RATES = read_messages("rate")


def cases(table: dict[str, Any]) -> pytest.MarkDecorator:
    """Run a test once for each row, named after its provider."""
    return pytest.mark.parametrize("case", table.values(), ids=table.keys())


class StatusError(Exception):
    """An SDK's error: status, message and body, as OpenAI's and Anthropic's have."""

    def __init__(self, text: str, body: str = "") -> None:
        super().__init__(text)
        self.message = text
        self.status_code = 400
        self.body = {"message": body or text}
        self.request = httpx.Request("POST", "https://provider.invalid/v1")
        self.response = httpx.Response(400, request=self.request, text=text)


class HoldingError(Exception):
    """An error with attributes, and nothing in its own text."""

    def __init__(self, **attributes: object) -> None:
        super().__init__("it broke")
        self.__dict__.update(attributes)


def caused(
    text: str,
    cause: BaseException | None,
    handled: str = "",
    is_disowned: bool = False,
) -> Exception:
    """An error that another one caused, or that was raised while one was handled."""
    error = Exception(text)
    error.__cause__ = cause
    if handled:
        error.__context__ = Exception(handled)
        error.__suppress_context__ = is_disowned
    return error


@pytest.fixture(scope="module")
def litellm() -> Iterator[ModuleType]:
    """LiteLLM as an offline program imports it, without its advertisements."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        warnings.simplefilter("ignore", DeprecationWarning)
        import litellm

        patch.setattr(litellm, "suppress_debug_info", True)
        yield litellm


def wrap(litellm: ModuleType, text: str) -> list[Exception]:
    """What LiteLLM raises for a provider's error, at once and in mid-stream."""
    mapping = litellm.litellm_core_utils.exception_mapping_utils
    original = StatusError(text)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        mapping.exception_type(
            model="m", original_exception=original, custom_llm_provider="openai"
        )

    mid_stream = litellm.exceptions.MidStreamFallbackError(
        message="the stream broke off after 128000 tokens",
        model="m",
        llm_provider="openai",
        original_exception=original,
    )
    return [raised.value, mid_stream]


@pytest.mark.litellm
@cases(OVERFLOWS)
def test_overflow_is_read(litellm: ModuleType, case: tuple[str, Overflow]) -> None:
    """Each provider's words give its counts, whatever their form."""
    text, expected = case
    nested = json.dumps({"error": json.dumps({"message": text})})
    for_html = json.dumps(text).replace(">", r"\u003e").replace("'", r"\u0027")
    forms = (text, text.upper(), text.replace(" ", "\n  "), nested, for_html)
    for error in (*(Exception(form) for form in forms), *wrap(litellm, text)):
        assert parse_overflow(error) == expected


@pytest.mark.litellm
@cases(REFUSALS | UNRELATED)
def test_other_failure_is_no_overflow(litellm: ModuleType, case: str) -> None:
    """Rate limits, quotas and other failures are none, whatever a wrapper quotes."""
    chained = caused("no answer to a request of 300000 > 200000", StatusError(case))
    group = ExceptionGroup("2 of 131072", [Exception(case), ValueError("8192")])
    for error in (Exception(case), *wrap(litellm, case), chained, group):
        assert parse_overflow(error) is None
    for text, _ in OVERFLOWS.values() if case in REFUSALS.values() else ():
        assert parse_overflow(Exception(f"{case} Your request: {text}")) is None
        assert parse_overflow(Exception(f"{text} caused: {case}")) is None


@pytest.mark.litellm
@cases(RATES)
def test_a_rate_limit_below_the_request_is_read(
    litellm: ModuleType, case: tuple[str, Overflow]
) -> None:
    """No wait helps, so that it is one, whatever the client makes of the error."""
    text, numbers = case
    expected = replace(numbers, period="minute")
    nested = json.dumps({"error": json.dumps({"message": text})})
    refused = HoldingError(status_code=429, message=text, code="rate_limit_exceeded")
    wrapped = caused("429 Too Many Requests", Exception(text))
    errors = [
        Exception(text),
        Exception(nested),
        refused,
        wrapped,
        *wrap(litellm, text),
    ]

    for error in errors:
        assert parse_overflow(error) == expected
        assert not is_transient(error)

    quoted = [types.UserContent(f"The log says: {text}")]
    quoting = HoldingError(status_code=429, message=f"slow down; input: {text}")
    assert parse_overflow(quoting, quoted) is None

    status = StatusError(text)
    status.status_code = 429
    mapping = litellm.litellm_core_utils.exception_mapping_utils
    with pytest.raises(litellm.exceptions.RateLimitError) as raised:
        mapping.exception_type("m", status, custom_llm_provider="openai")
    assert parse_overflow(raised.value) == expected


UNNAMED = {
    "anthropic-rate": 30_000,
    "gemini-quota": 250_000,
    "litellm-tpm": 30_000,
    "together-tpm": 60_000,
}


@pytest.mark.parametrize(("name", "limit"), UNNAMED.items(), ids=UNNAMED)
def test_a_rate_limit_is_compared_with_the_estimate(name: str, limit: int) -> None:
    """Where the provider does not say how much was sent."""
    error = HoldingError(status_code=429, message=REFUSALS[name])
    found = parse_overflow(error, sent_tokens=limit + 1)
    assert found == Overflow(limit, period="minute")
    assert parse_overflow(error, sent_tokens=limit) is None


def test_a_rate_limit_of_a_day_is_told_from_one_of_a_minute() -> None:
    """What is said of it names the time."""
    text = "on tokens per day (TPD): Limit 9000, Requested 9001, please try again."
    assert parse_overflow(Exception(text)) == Overflow(9_000, 9_001, period="day")


LIMIT = "maximum context length is {}"
SAID: dict[str, tuple[str, Overflow]] = {
    "underscores": (LIMIT.format("200_000"), said(200_000)),
    "too small": (LIMIT.format("255"), said()),
    "unit": (LIMIT.format("128k"), said()),
    "too large": (LIMIT.format("100000001"), said()),
    "two limits": (f"{LIMIT.format(300)}. {LIMIT.format(8192)}", said()),
    "repeated": (f"{LIMIT.format('8,192')}. {LIMIT.format(8192)}", said(8_192)),
    "far": (f"{LIMIT.format(8192)} {'x ' * 400} contains 9000 tokens", said(8_192)),
    "contradiction": (
        f"{LIMIT.format(8192)}; requested 9 tokens (99 in the output)",
        said(8_192, None, 99),
    ),
    "before an echo": (f"{TEXT} {'word ' * 200_000}", MEANING),
}


@cases(SAID)
def test_numbers_must_be_plausible(case: tuple[str, Overflow]) -> None:
    """What cannot be meant is unknown, and still an overflow."""
    assert parse_overflow(Exception(case[0])) == case[1]


@pytest.mark.parametrize(
    "unit",
    [
        "1",
        "(1 tokens) ",
        "\\",
        "İ",
        "input length 1 exceeds the maximum ",
        "maximum context length is 999 ",
    ],
)
def test_hostile_text_takes_linear_time(unit: str) -> None:
    """A wording that starts again and again is read in proportion to its length."""

    def repeat(chars: int) -> Exception:
        return Exception(unit * (chars // len(unit)))

    assert time_growth(repeat, parse_overflow, 100_000) < MAX_GROWTH


STATUS_429: dict[str, object] = {"status_code": 429, "message": TEXT}
GENAI: Any = {"error": {"code": 400, "message": TEXT}}
GROUP = BaseExceptionGroup("inner", [KeyboardInterrupt(), Exception(TEXT)])
ERRORS: dict[str, tuple[BaseException, Overflow | None]] = {
    "genai": (genai_errors.ClientError(400, GENAI), MEANING),
    "message": (HoldingError(message=TEXT), MEANING),
    "nested": (HoldingError(body={"error": {"message": TEXT}}), MEANING),
    "response": (HoldingError(response=httpx.Response(400, text=TEXT)), MEANING),
    "code": (HoldingError(code="context_length_exceeded"), said()),
    "status 429": (HoldingError(**STATUS_429), None),
    "body refuses": (StatusError(TEXT, REFUSAL), None),
    "cause": (caused("Prompt is too long", Exception(TEXT)), MEANING),
    "own numbers": (caused(TEXT, Exception(OVERFLOWS["gemini"][0])), MEANING),
    "quoting wrapper": (
        caused(f"no answer to {TEXT!r}", ExceptionGroup("all", [Exception(REFUSAL)])),
        None,
    ),
    "nested groups": (BaseExceptionGroup("", [Exception(REFUSAL), GROUP]), MEANING),
    "handled": (caused("no answer", None, TEXT), MEANING),
    "disowned": (caused("no answer", None, TEXT, True), None),
    "fallback fails": (caused(TEXT, None, REFUSAL), MEANING),
    "fallback refused": (caused(REFUSAL, None, TEXT), None),
}


@cases(ERRORS)
def test_error_is_read(case: tuple[BaseException, Overflow | None]) -> None:
    """What an error says, by itself and through what it is linked to."""
    assert parse_overflow(case[0]) == case[1]


def test_unread_response_is_left_alone() -> None:
    """A response that was not read is not read now, be it httpx's or requests'."""

    class RequestsResponse:
        _content = False

        @property
        def text(self) -> str:
            pytest.fail("this would go to the network")

    streaming = httpx.Response(400, stream=httpx.ByteStream(b"prompt is too long"))
    for response in (RequestsResponse(), streaming):
        assert parse_overflow(HoldingError(response=response)) is None


def test_hostile_error_is_survived() -> None:
    """Whatever fails when it is looked at does not hide the rest."""

    class HostileError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("no attributes")

    class Hostile:
        __hash__ = None  # type: ignore[assignment]

        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise RuntimeError("no class")

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no comparison")

    hostile = Hostile()
    names = ("status_code", "original_exception", "details", "body")
    error = HoldingError(message=TEXT, **dict.fromkeys(names, hostile))
    assert parse_overflow(error) == MEANING
    assert parse_overflow(HostileError()) is None


def test_a_quotation_of_several_parts_is_no_rate_limit() -> None:
    """An error may put side by side what stands in parts of a message."""
    said = "tokens per minute (TPM): Lim", "it 1000, Requested 900000"
    error = Exception(f"400: unsupported characters in input: '{''.join(said)}'")
    assert parse_overflow(error, [user(*said)]) is None
    assert parse_overflow(error, [user("Hello.")]) is not None


def test_many_matches_of_an_error_cost_little() -> None:
    """Each of them is looked for in the whole request."""
    error = Exception(
        "".join(f"limit of {n} tokens per minute, " for n in range(9_999))
    )
    assert parse_overflow(error, [user("word " * 200_000)]) is None
