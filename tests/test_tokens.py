"""Measuring contents and requests, and calibrating the measure."""

import base64
import random
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.genai import types
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from contextguard_adk.measuring.calibration import (
    DEFAULT_CORRECTION,
    MAX_CORRECTION,
    calibrated_tokens,
    correction_factor,
    estimate_growth_tokens,
    estimate_prompt_tokens,
    request_spare_tokens,
)
from contextguard_adk.measuring.tokens import (
    content_bytes,
    estimate_config_tokens,
    estimate_content_tokens,
    estimate_contents_tokens,
    estimate_conversation_tokens,
    estimate_part_tokens,
    estimate_request_tokens,
    measure_part,
    media_tokens,
    part_bytes,
)
from tests.builders import call, call_part, model, response, user

# A machine under load is no reason to fail.
unhurried = settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)


def blob(mime_type: str, size_bytes: int) -> types.Part:
    """A part with data of that type and size."""
    return types.Part(
        inline_data=types.Blob(mime_type=mime_type, data=b"\0" * size_bytes)
    )


def reference(mime_type: str | None) -> types.Part:
    """A part that refers to a file."""
    return types.Part(
        file_data=types.FileData(file_uri="gs://bucket/file", mime_type=mime_type)
    )


def result_part(**fields: Any) -> types.Part:
    """A part with a tool result."""
    return types.Part(function_response=types.FunctionResponse(**fields))


# --- contents


@pytest.mark.parametrize(
    ("part", "size_bytes"),
    [
        pytest.param(None, 0, id="none"),
        pytest.param(types.Part(), 0, id="empty"),
        pytest.param(types.Part(text=""), 0, id="empty-text"),
        pytest.param(types.Part(text="hello"), 5, id="text"),
        pytest.param(types.Part(text="日本語"), 9, id="utf8"),
        pytest.param(types.Part(text="\ud800"), 3, id="lone-surrogate"),
        pytest.param(types.Part(text="why", thought=True), 3, id="thought"),
        pytest.param(types.Part(thought_signature=b"x" * 900), 0, id="signature"),
        pytest.param(
            types.Part(text="", thought=True, part_metadata={"a": "b"}), 0, id="silent"
        ),
        pytest.param(call_part("read", path="/a"), 4 + 13, id="call"),
        pytest.param(call_part("read", "call-1", path="/a"), 4 + 13, id="call-id"),
        pytest.param(
            types.Part(function_call=types.FunctionCall(name="stop")), 4, id="no-args"
        ),
        pytest.param(
            types.Part(function_call=types.FunctionCall(args={"a": 1})), 7, id="no-name"
        ),
        pytest.param(
            result_part(name="read", response={"result": "ok"}), 4 + 15, id="result"
        ),
        pytest.param(result_part(id="1"), 0, id="empty-result"),
        pytest.param(
            result_part(name="read", response={"a": b"\xff"}), 4 + 13, id="bytes"
        ),
        pytest.param(
            types.Part(
                executable_code=types.ExecutableCode(
                    code="print(1)", language=types.Language.PYTHON
                )
            ),
            8,
            id="code",
        ),
        pytest.param(
            types.Part(
                code_execution_result=types.CodeExecutionResult(
                    output="1\n", outcome=types.Outcome.OUTCOME_OK
                )
            ),
            2,
            id="code-output",
        ),
        pytest.param(
            types.Part(tool_call=types.ToolCall(id="1", args={"q": "x"})),
            len('{"id":"1","args":{"q":"x"}}'),
            id="unknown-kind",
        ),
    ],
)
def test_part_counts_what_the_model_reads(
    part: types.Part | None, size_bytes: int
) -> None:
    """Text, names, arguments, results and code count; ids and signatures do not."""
    assert part_bytes(part) == size_bytes
    assert estimate_part_tokens(part) == -(-size_bytes // 4)


@pytest.mark.parametrize(
    ("content", "tokens"),
    [
        pytest.param(None, 0, id="none"),
        pytest.param(types.Content(), 0, id="no-parts"),
        pytest.param(types.Content(role="user", parts=[]), 0, id="empty-parts"),
        pytest.param(user("hello"), 2, id="text"),
        pytest.param(user("a", "b", "c"), 1, id="rounded-once"),
        pytest.param(model("é" * 4), 2, id="utf8"),
    ],
)
def test_content_is_the_sum_of_its_parts(
    content: types.Content | None, tokens: int
) -> None:
    """The bytes of all parts are divided by four and rounded up once."""
    assert estimate_content_tokens(content) == tokens


def test_contents_are_rounded_up_once() -> None:
    """A thousand contents of one byte are 250 tokens, not 1,000."""
    assert estimate_contents_tokens([user("x")] * 1_000) == 250


def test_contents_may_hold_nothing() -> None:
    """A part that is None counts nothing, whatever is asked of it."""
    contents = [types.Content.model_construct(role="user", parts=[None])]
    assert estimate_contents_tokens(contents) == 0
    assert estimate_conversation_tokens(contents) == 1
    assert estimate_prompt_tokens(10, 8, 8, contents) == 10


def test_contents_may_be_any_iterable() -> None:
    """A generator is measured like a list."""
    assert estimate_contents_tokens(user("x" * 8) for _ in range(2)) == 4


@pytest.mark.parametrize(
    ("contents", "with_roles", "without_roles"),
    [
        pytest.param([], 0, 0, id="empty"),
        pytest.param([user("Hello"), model("Hi there")], 7, 4, id="messages"),
        pytest.param([call("read_file", path="/foo/bar.txt")], 11, 8, id="tool-call"),
        pytest.param(
            [response("read_file", "x" * 10_000)], 2_504, 2_506, id="tool-result"
        ),
        pytest.param(
            [response("read_file", {"a": "x" * 100, "b": 1})], 32, 31, id="object"
        ),
        pytest.param([response("read_file", {})], 4, 3, id="empty-result"),
        pytest.param([types.Content(parts=[types.Part(text="x")])], 1, 1, id="no-role"),
        pytest.param([types.Content(role="user")], 1, 0, id="no-parts"),
    ],
)
def test_conversation_counts_the_names_of_roles(
    contents: list[types.Content], with_roles: int, without_roles: int
) -> None:
    """The documented numbers of a chat conversation come out exactly."""
    assert estimate_conversation_tokens(contents) == with_roles
    assert estimate_conversation_tokens(contents, count_roles=False) == without_roles
    assert estimate_contents_tokens(contents) == without_roles


# --- media


@pytest.mark.parametrize(
    ("mime_type", "size_bytes", "tokens"),
    [
        pytest.param("image/png", 5_000_000, 1_120, id="image"),
        pytest.param("IMAGE/JPEG", 900, 1_120, id="small-image"),
        pytest.param("image/svg+xml", None, 1_120, id="image-reference"),
        pytest.param("image/png", 0, 0, id="no-data"),
        pytest.param("audio/mpeg", 80_000, 320, id="audio"),
        pytest.param("audio/mpeg", 1, 32, id="one-second"),
        pytest.param("audio/wav", 320_000, 320, id="wave"),
        pytest.param("audio/x-wav", 320_000, 320, id="x-wave"),
        pytest.param("audio/l16;rate=16000", 320_000, 320, id="pcm"),
        pytest.param("audio/mpeg", None, 1_920, id="audio-reference"),
        pytest.param("video/mp4", 1_250_000, 2_630, id="video"),
        pytest.param("video/*", None, 15_780, id="video-reference"),
        pytest.param("application/pdf", 500_000, 5_600, id="pdf"),
        pytest.param("application/pdf", 10**9, 560_000, id="longest-pdf"),
        pytest.param("application/pdf", None, 5_600, id="pdf-reference"),
        pytest.param("text/csv", 4_001, 1_001, id="csv"),
        pytest.param("application/json", 4_000, 1_000, id="json"),
        pytest.param("application/ld+json; charset=utf-8", 4_000, 1_000, id="ld-json"),
        pytest.param("text/plain", None, 1_000, id="text-reference"),
        pytest.param("application/jsonish", 9, 1_000, id="not-json"),
        pytest.param("application/zip", 9_000_000, 1_000, id="other"),
        pytest.param(None, 9, 1_000, id="unknown"),
    ],
)
def test_media_count_by_kind(
    mime_type: str | None, size_bytes: int | None, tokens: int
) -> None:
    """Images, recordings and documents count what providers publish for their kind."""
    assert media_tokens(mime_type, size_bytes) == tokens


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        pytest.param(blob("image/png", 4_000_000), 1_120, id="image"),
        pytest.param(types.Part(inline_data=types.Blob()), 0, id="empty-blob"),
        pytest.param(reference("application/pdf"), 5_600, id="reference"),
        pytest.param(reference(None), 1_000, id="unknown-reference"),
        pytest.param(
            result_part(
                name="shot",
                response={"result": "ok"},
                parts=[
                    types.FunctionResponsePart(
                        inline_data=types.FunctionResponseBlob(
                            mime_type="image/png", data=b"x" * 9_000
                        )
                    ),
                    types.FunctionResponsePart(
                        file_data=types.FunctionResponseFileData(
                            mime_type="image/png", file_uri="gs://bucket/file"
                        )
                    ),
                ],
            ),
            2 * 1_120 + 5,
            id="images-in-a-result",
        ),
    ],
)
def test_part_counts_its_media(part: types.Part, tokens: int) -> None:
    """Media count by kind, never by the bytes of their data."""
    assert estimate_part_tokens(part) == tokens


# --- configuration and requests


class Answer(BaseModel):
    """A response schema."""

    text: str = Field(description="The answer")


class Unschemable(BaseModel):
    """A model for which there is no JSON schema."""

    value: Callable[[], int]


def declare(**fields: Any) -> types.GenerateContentConfig:
    """A configuration with one declared function."""
    declaration = types.FunctionDeclaration(name="read", **fields)
    return types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declaration])]
    )


def some_tool(path: str) -> str:
    """A callable in the list of tools."""
    return path


SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TYPED_SCHEMA = types.Schema(
    type=types.Type.OBJECT, properties={"path": types.Schema(type=types.Type.STRING)}
)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        pytest.param(None, 0, id="none"),
        pytest.param(types.GenerateContentConfig(temperature=0.5), 0, id="no-prompt"),
        pytest.param(
            types.GenerateContentConfig(system_instruction="x" * 40), 10, id="text"
        ),
        pytest.param(
            types.GenerateContentConfig(system_instruction=user("x" * 20, "y" * 20)),
            10,
            id="content",
        ),
        pytest.param(
            types.GenerateContentConfig(system_instruction=types.Part(text="x" * 8)),
            2,
            id="part",
        ),
        pytest.param(
            types.GenerateContentConfig(
                system_instruction=["x" * 8, types.Part(text="y" * 8)]
            ),
            4,
            id="list",
        ),
        pytest.param(declare(description="x" * 16), 5, id="description"),
        pytest.param(declare(parameters_json_schema=SCHEMA), 16, id="json-schema"),
        pytest.param(declare(parameters=TYPED_SCHEMA), 16, id="typed-schema"),
        pytest.param(
            declare(parameters=TYPED_SCHEMA, response=TYPED_SCHEMA), 31, id="response"
        ),
        pytest.param(
            declare(behavior=types.Behavior.NON_BLOCKING), 1, id="behaviour-is-unread"
        ),
        pytest.param(
            types.GenerateContentConfig(
                tools=[some_tool, types.Tool(google_search=types.GoogleSearch())]
            ),
            0,
            id="nothing-declared",
        ),
        pytest.param(
            types.GenerateContentConfig(response_json_schema=SCHEMA), 15, id="output"
        ),
        pytest.param(
            types.GenerateContentConfig(response_schema=TYPED_SCHEMA), 15, id="typed"
        ),
        pytest.param(
            types.GenerateContentConfig(response_schema=Unschemable), 0, id="no-schema"
        ),
        pytest.param(types.GenerateContentConfig(response_schema=int), 0, id="int"),
        pytest.param(
            types.GenerateContentConfig(response_schema=list[int]), 0, id="generic"
        ),
    ],
)
def test_config_counts_what_reaches_the_prompt(
    config: types.GenerateContentConfig | None, tokens: int
) -> None:
    """Instruction, declared functions and response schema count, settings do not."""
    assert estimate_config_tokens(config) == pytest.approx(tokens, abs=2)


def test_config_counts_the_schema_of_a_model_class() -> None:
    """A class counts as its JSON schema, alone and as the items of a list."""
    config = types.GenerateContentConfig(response_schema=Answer)
    listed = types.GenerateContentConfig(response_schema=list[Answer])
    assert 20 < estimate_config_tokens(config) < 80
    assert estimate_config_tokens(config) == estimate_config_tokens(listed)


def test_request_is_contents_and_config_rounded_once() -> None:
    """The request's heuristic is the sum of all its bytes / 4."""
    request = LlmRequest(
        contents=[user("x"), model("y")],
        config=types.GenerateContentConfig(system_instruction="zz"),
    )
    assert estimate_request_tokens(request) == 1


# --- calibration


@pytest.mark.parametrize(
    ("real", "last", "factor"),
    [
        pytest.param(None, None, DEFAULT_CORRECTION, id="first-turn"),
        pytest.param(None, 100, DEFAULT_CORRECTION, id="no-usage"),
        pytest.param(0, 100, DEFAULT_CORRECTION, id="usage-of-zero"),
        pytest.param(100, 0, DEFAULT_CORRECTION, id="empty-request"),
        pytest.param(140_000, 70_000, 2.0, id="twice"),
        pytest.param(900, 100, MAX_CORRECTION, id="at-most-five"),
        pytest.param(50, 100, 1.0, id="at-least-one"),
    ],
)
def test_correction_is_the_last_ratio(
    real: int | None, last: int | None, factor: float
) -> None:
    """The correction is real over heuristic, between 1 and 5, else the default."""
    assert correction_factor(real, last) == factor


def test_correction_default_is_a_setting() -> None:
    """The factor for the first turn can be chosen."""
    assert correction_factor(None, None, default=2.0) == 2.0
    assert calibrated_tokens(100, None, None, default=2.0) == 200


@pytest.mark.parametrize(
    ("heuristic", "real", "last", "tokens"),
    [
        pytest.param(90_000, 140_000, 70_000, 180_000, id="tool-result-between-calls"),
        pytest.param(150_008, 100_000, 50_000, 300_016, id="massive-tool-result"),
        pytest.param(1_000, None, None, 1_500, id="first-turn"),
        pytest.param(70_000, 140_000, 70_000, 140_000, id="nothing-new"),
        pytest.param(200, 900, 100, 1_000, id="ratio-capped"),
        pytest.param(101, 900, 100, 900, id="real-is-the-floor"),
        pytest.param(110, 50, 100, 110, id="ratio-floored"),
        pytest.param(10_000, 140_000, 70_000, 20_000, id="shrunk"),
        pytest.param(100, 500, None, 500, id="real-without-heuristic"),
    ],
)
def test_calibrated_tokens_follow_the_documented_rule(
    heuristic: int, real: int | None, last: int | None, tokens: int
) -> None:
    """The larger of real and heuristic x correction, unless the request shrank."""
    assert calibrated_tokens(heuristic, real, last) == tokens


# --- growth

PROSE = "the road along the cliff ended two hundred metres short of the door. " * 300
DENSE = base64.b64encode(random.Random(3).randbytes(15_000)).decode()


@pytest.mark.parametrize(
    ("newest", "least_ratio", "most_ratio"),
    [
        pytest.param(user(PROSE), 1.0, 1.0, id="prose-is-never-weighted-down"),
        pytest.param(user(DENSE), 2.4, 2.9, id="base64"),
        pytest.param(response("read", DENSE), 2.4, 2.9, id="base64-in-a-result"),
        pytest.param(
            response("rows", {"rows": [[i, i * 7919, i / 7] for i in range(800)]}),
            1.7,
            2.3,
            id="numbers-in-json",
        ),
        pytest.param(
            types.Content(role="user", parts=[blob("image/png", 10_000)] * 18),
            1.0,
            1.0,
            id="media",
        ),
    ],
)
def test_growth_is_weighted_by_its_density(
    newest: types.Content, least_ratio: float, most_ratio: float
) -> None:
    """What the newest content adds is judged by its own text, not by older text."""
    older = [user(PROSE), model(PROSE)]
    growth = estimate_content_tokens(newest)
    ratio = estimate_growth_tokens([*older, newest], growth) / growth
    assert least_ratio <= ratio <= most_ratio


@pytest.mark.parametrize("growth", [0, -5])
def test_growth_of_nothing_is_nothing(growth: int) -> None:
    """A request that stayed or shrank grew by no tokens."""
    assert estimate_growth_tokens([user(DENSE)], growth) == 0


def test_growth_that_no_content_explains_keeps_its_heuristic() -> None:
    """More tools or a longer instruction count as they were measured."""
    assert estimate_growth_tokens([], 500) == 500
    assert estimate_growth_tokens([types.Content(role="user")], 500) == 500


def test_prompt_is_the_documented_rule_for_prose() -> None:
    """Where the growth is no denser than the rest, the documented numbers stand."""
    contents = [user(PROSE), model(PROSE)]
    assert estimate_prompt_tokens(90_000, 140_000, 70_000, contents) == 180_000
    assert estimate_prompt_tokens(150_008, 100_000, 50_000, contents) == 300_016
    assert estimate_prompt_tokens(1_000, None, None, contents) == 1_500
    assert estimate_prompt_tokens(1_000, None, None, contents, default=2.0) == 2_000


def test_prompt_sees_base64_after_prose() -> None:
    """5k heuristic tokens of base64 after 20k of prose pass no 32k window unnoticed."""
    contents = [user(PROSE * 4), response("read", DENSE)]
    heuristic = estimate_contents_tokens(contents)
    last = estimate_contents_tokens(contents[:1])
    estimate = estimate_prompt_tokens(heuristic, last, last, contents)
    assert calibrated_tokens(heuristic, last, last) < 26_000
    assert estimate > last + 2.4 * (heuristic - last)


def test_prompt_scales_growth_to_the_provider() -> None:
    """A provider that counted half as much again does so for what grew."""
    contents = [user(PROSE * 4), response("read", DENSE)]
    heuristic = estimate_contents_tokens(contents)
    last = estimate_contents_tokens(contents[:1])
    estimate = estimate_prompt_tokens(heuristic, int(last * 1.3), last, contents)
    assert estimate > last * 1.3 + 1.3 * 2.4 * (heuristic - last)


def test_prompt_does_not_scale_growth_without_bound() -> None:
    """Tokens that the guard cannot see do not multiply what grew more than twice."""
    contents = [user(PROSE), response("read", DENSE)]
    heuristic = estimate_contents_tokens(contents)
    last = estimate_contents_tokens(contents[:1])
    growth = heuristic - last
    estimate = estimate_prompt_tokens(heuristic, last * 4, last, contents)
    assert estimate == pytest.approx(last * 4 + 2 * 2.65 * growth, rel=0.05)
    assert estimate > calibrated_tokens(heuristic, last * 4, last)


def test_prompt_of_small_growth_is_not_scaled() -> None:
    """A small step costs no look at the older contents and is hardly off."""
    contents = [user(PROSE * 8), user(DENSE[:400])]
    heuristic = estimate_contents_tokens(contents)
    last = heuristic - 100
    estimate = estimate_prompt_tokens(heuristic, last, last, contents)
    assert 220 <= estimate - last <= 290


@pytest.mark.parametrize(
    ("real", "last"),
    [pytest.param(None, None, id="nothing"), pytest.param(None, 10, id="no-usage")],
)
def test_prompt_of_a_first_call_sees_dense_text(
    real: int | None, last: int | None
) -> None:
    """Where nothing is known base64 counts more than the default factor."""
    contents = [user(DENSE)]
    heuristic = estimate_contents_tokens(contents)
    estimate = estimate_prompt_tokens(heuristic, real, last, contents)
    assert 2.4 * heuristic < estimate < 2.9 * heuristic


def test_prompt_that_shrank_forgets_the_real_count() -> None:
    """After a rewind only the ratio is left of what the provider counted."""
    assert estimate_prompt_tokens(10_000, 140_000, 70_000, [user(DENSE)]) == 20_000


# --- counts below bytes / 4

RUSSIAN = "Дорога вдоль обрыва кончалась в двухстах метрах от двери маяка. " * 100


@pytest.mark.parametrize(
    ("contents", "real_ratio", "expected_ratio"),
    [
        pytest.param([user(RUSSIAN)], 0.55, 0.55, id="what-Russian-takes"),
        pytest.param([user(RUSSIAN)], 0.4, 0.47, id="less-than-it-was-seen-to-take"),
        pytest.param([user(RUSSIAN)], 0.3, 1.0, id="not-believed"),
        pytest.param([user(PROSE)], 0.8, 1.0, id="English"),
        pytest.param([user("Die Straße endete für Jörg. " * 200)], 0.8, 1.0, id="de"),
        pytest.param(
            [user("悬崖边的路在离门两百米的地方就断了。" * 90)], 0.8, 1.0, id="zh"
        ),
        pytest.param([user(RUSSIAN), user(PROSE)], 0.7, 0.81, id="half-and-half"),
    ],
)
def test_low_count_is_believed_where_the_script_explains_it(
    contents: list[types.Content], real_ratio: float, expected_ratio: float
) -> None:
    """Never below what the script was seen to take, and ASCII counts in full."""
    heuristic = estimate_contents_tokens(contents)
    real = int(heuristic * real_ratio)
    estimate = estimate_prompt_tokens(heuristic, real, heuristic, contents)
    assert estimate / heuristic == pytest.approx(expected_ratio, abs=0.02)


@pytest.mark.parametrize(
    ("newest", "least_ratio", "most_ratio"),
    [
        pytest.param(user(PROSE), 1.0, 1.01, id="English"),
        pytest.param(response("read", DENSE), 2.4, 2.9, id="base64"),
        pytest.param(user(RUSSIAN), 1.0, 1.01, id="Russian"),
    ],
)
def test_low_count_says_nothing_of_what_grew(
    newest: types.Content, least_ratio: float, most_ratio: float
) -> None:
    """What comes after Russian counts at least bytes / 4, on top of the low count."""
    older = [user(RUSSIAN * 3)]
    last = estimate_contents_tokens(older)
    growth = estimate_content_tokens(newest)
    real = int(last * 0.55)
    estimate = estimate_prompt_tokens(last + growth, real, last, [*older, newest])
    assert least_ratio <= (estimate - real) / growth <= most_ratio


@pytest.mark.parametrize(
    ("contents", "expected_ratio"),
    [
        pytest.param([user(RUSSIAN * 2)], 0.55, id="the-same-script"),
        pytest.param([user(PROSE)], 1.0, id="English"),
        pytest.param([user(RUSSIAN), user(PROSE[:9_000])], 0.70, id="both"),
    ],
)
def test_low_count_of_a_longer_request_is_bounded_by_what_is_left(
    contents: list[types.Content], expected_ratio: float
) -> None:
    """After a rewind the scripts that are there now bound the correction."""
    heuristic = estimate_contents_tokens(contents)
    last = heuristic * 2
    estimate = estimate_prompt_tokens(heuristic, int(last * 0.55), last, contents)
    assert estimate / heuristic == pytest.approx(expected_ratio, abs=0.02)


def test_script_of_the_instruction_explains_a_low_count() -> None:
    """The instruction may be the longest text of a request."""
    config = types.GenerateContentConfig(system_instruction=RUSSIAN)
    heuristic = estimate_config_tokens(config)
    real = int(heuristic * 0.55)
    without = estimate_prompt_tokens(heuristic, real, heuristic, [])
    assert without == heuristic
    estimate = estimate_prompt_tokens(heuristic, real, heuristic, [], config=config)
    assert estimate == real


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(types.Part(text=RUSSIAN), id="text"),
        pytest.param(call_part("write", text=RUSSIAN), id="arguments"),
        pytest.param(result_part(name="read", response={"text": RUSSIAN}), id="result"),
    ],
)
def test_spare_tokens_are_found_wherever_text_is(part: types.Part) -> None:
    """In texts, arguments and results alike."""
    spare = measure_part(part).spare_tokens
    assert 0.5 < spare / estimate_part_tokens(part) < 0.55
    contents = [types.Content(role="user", parts=[part])]
    assert request_spare_tokens(contents) == int(spare)
    assert request_spare_tokens([user(PROSE), types.Content()]) == 0


# --- properties

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
odd_text = st.text(alphabet=st.characters(), max_size=60)
parts = st.one_of(
    odd_text.map(lambda text: types.Part(text=text)),
    st.builds(
        lambda name, args: types.Part(
            function_call=types.FunctionCall(name=name, args=args)
        ),
        st.text(),
        st.dictionaries(st.text(), json_values),
    ),
    st.builds(
        lambda name, result: types.Part(
            function_response=types.FunctionResponse.model_construct(
                name=name, response={"result": result}, parts=None
            )
        ),
        st.text(),
        st.one_of(json_values, odd_text, st.binary(), st.just(object())),
    ),
    st.builds(blob, st.sampled_from(["image/png", "text/csv", ""]), st.integers(0, 99)),
    st.just(types.Part()),
)
histories = st.lists(
    st.builds(
        types.Content,
        role=st.sampled_from(["user", "model"]),
        parts=st.lists(parts, max_size=3),
    ),
    max_size=6,
)


@unhurried
@given(histories)
def test_measure_is_additive_and_never_negative(contents: list[types.Content]) -> None:
    """The whole is the sum of its contents, whatever they hold."""
    sizes = [content_bytes(content) for content in contents]
    assert all(size >= 0 for size in sizes)
    assert estimate_contents_tokens(contents) == -(-sum(sizes) // 4)
    assert estimate_conversation_tokens(contents) >= 0


@unhurried
@given(
    histories,
    st.integers(0, 10_000),
    st.none() | st.integers(0, 10_000),
    st.none() | st.integers(0, 10_000),
)
def test_prompt_estimate_is_never_below_what_its_scripts_allow(
    contents: list[types.Content], heuristic: int, real: int | None, last: int | None
) -> None:
    """Density weights an estimate up, never down; only a script may lower it."""
    estimate = estimate_prompt_tokens(heuristic, real, last, contents)
    spare = request_spare_tokens(contents)
    assert estimate >= heuristic - spare
    if not spare or (real or 0) >= (last or 0):
        assert estimate >= calibrated_tokens(heuristic, real, last) >= heuristic
    if heuristic > (last or 0):
        assert estimate >= (real or 0) + (heuristic - last if real and last else 0)
    assert estimate_growth_tokens(contents, heuristic) >= heuristic
