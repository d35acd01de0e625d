"""From the heuristic of a request, and the last count, to its prompt tokens."""

from __future__ import annotations

import base64
import random

import pytest
from google.genai import types
from hypothesis import given, settings
from hypothesis import strategies as st

from contextguard_adk._measuring.calibration import (
    correction_factor,
    estimate_prompt_tokens,
    request_script_discount,
)
from contextguard_adk._measuring.tokens import (
    estimate_config_tokens,
    estimate_contents_tokens,
)
from tests.builders import call, model, response, user

PROSE = "the road along the cliff ended two hundred metres short of the door. " * 300
DENSE = base64.b64encode(random.Random(3).randbytes(15_000)).decode()
RUSSIAN = "Дорога вдоль обрыва кончалась в двухстах метрах от двери маяка. " * 100
CHINESE = "悬崖边的路在离门两百米的地方就断了。" * 90
IMAGE = types.Part(inline_data=types.Blob(mime_type="image/png", data=b"\0" * 9))


@pytest.mark.parametrize(
    ("heuristic", "real", "last", "tokens"),
    [
        pytest.param(90_000, 140_000, 70_000, 180_000, id="tool-result-between-calls"),
        pytest.param(150_008, 100_000, 50_000, 300_016, id="massive-tool-result"),
        pytest.param(1_000, None, None, 1_500, id="first-turn"),
        pytest.param(1_000, 0, 100, 1_500, id="usage-of-zero"),
        pytest.param(70_000, 140_000, 70_000, 140_000, id="nothing-new"),
        pytest.param(100, 900, 100, 900, id="more-than-five-times"),
        pytest.param(110, 50, 100, 110, id="ratio-floored"),
        pytest.param(10_000, 140_000, 70_000, 20_000, id="shrunk"),
        pytest.param(100, 500, None, 500, id="real-without-heuristic"),
    ],
)
def test_prose_follows_the_documented_rule(
    heuristic: int, real: int | None, last: int | None, tokens: int
) -> None:
    """The larger of real and heuristic x correction, unless the request shrank."""
    contents = [user(PROSE), model(PROSE)]
    assert estimate_prompt_tokens(heuristic, real, last, contents) == tokens
    assert estimate_prompt_tokens(heuristic, real, last, []) == tokens


@pytest.mark.parametrize(
    ("newest", "least_ratio", "most_ratio"),
    [
        (user(PROSE), 1.0, 1.0),
        (user(DENSE), 2.4, 2.9),
        (response("read", DENSE), 2.4, 2.9),
        (call("write", text=DENSE), 2.4, 2.9),
        (response("rows", {"rows": [[i, i * 7919] for i in range(800)]}), 1.4, 2.3),
        (types.Content(role="user", parts=[IMAGE] * 18), 1.0, 1.0),
    ],
    ids=["prose", "base64", "result", "call", "numbers", "media"],
)
def test_text_is_weighted_by_its_density(
    newest: types.Content, least_ratio: float, most_ratio: float
) -> None:
    """While nothing is known every content counts by its own text."""
    heuristic = estimate_contents_tokens([newest])
    estimate = estimate_prompt_tokens(heuristic, None, None, [newest], default=1.0)
    assert least_ratio <= estimate / heuristic <= most_ratio


@pytest.mark.parametrize(
    ("count_ratio", "least_scale", "most_scale"),
    [(1.0, 0.95, 1.05), (1.35, 1.25, 1.45), (4.0, 1.9, 2.1)],
)
def test_growth_is_scaled_to_the_provider(
    count_ratio: float, least_scale: float, most_scale: float
) -> None:
    """A provider that counts more tokens in old prose does so in new base64."""
    contents = [user(PROSE * 4), response("read", DENSE)]
    last = estimate_contents_tokens(contents[:1])
    growth = estimate_contents_tokens(contents[1:])
    real = int(last * count_ratio)
    estimate = estimate_prompt_tokens(last + growth, real, last, contents)
    assert least_scale < (estimate - real) / growth / 2.65 < most_scale


@pytest.mark.parametrize(
    ("texts", "real_ratio", "expected_ratio"),
    [
        pytest.param([RUSSIAN], 0.55, 0.55, id="what-Russian-takes"),
        pytest.param([RUSSIAN], 0.4, 0.47, id="less-than-it-was-seen-to-take"),
        pytest.param([RUSSIAN], 0.3, 1.0, id="not-believed"),
        pytest.param([PROSE], 0.8, 1.0, id="English"),
        pytest.param([CHINESE], 0.8, 1.0, id="Chinese"),
        pytest.param([RUSSIAN, PROSE], 0.7, 0.81, id="half-and-half"),
    ],
)
def test_low_count_is_believed_where_the_script_explains_it(
    texts: list[str], real_ratio: float, expected_ratio: float
) -> None:
    """Never below what the script was seen to take, and ASCII counts in full."""
    contents = [user(text) for text in texts]
    heuristic = estimate_contents_tokens(contents)
    real = int(heuristic * real_ratio)
    estimate = estimate_prompt_tokens(heuristic, real, heuristic, contents)
    assert estimate / heuristic == pytest.approx(expected_ratio, abs=0.02)


def test_what_grew_does_not_explain_a_low_count() -> None:
    """A low count of English is not believed because Russian came after it."""
    contents = [user(PROSE), user(RUSSIAN * 3)]
    last = estimate_contents_tokens(contents[:1])
    now = estimate_contents_tokens(contents)
    assert estimate_prompt_tokens(now, 2_400, last, contents) >= now


def test_script_of_the_instruction_explains_a_low_count() -> None:
    """The instruction may be the longest text of a request."""
    config = types.GenerateContentConfig(system_instruction=RUSSIAN)
    heuristic = estimate_config_tokens(config)
    real = int(heuristic * 0.55)
    assert estimate_prompt_tokens(heuristic, real, heuristic, []) == heuristic
    estimate = estimate_prompt_tokens(heuristic, real, heuristic, [], config=config)
    assert estimate == real


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.sampled_from([PROSE, DENSE, RUSSIAN, CHINESE, "", "é"]), max_size=4),
    st.integers(0, 10_000),
    st.none() | st.integers(0, 10_000),
    st.none() | st.integers(0, 10_000),
)
def test_estimate_is_never_below_what_its_scripts_allow(
    texts: list[str], heuristic: int, real: int | None, last: int | None
) -> None:
    """Density weights an estimate up, never down; only a script may lower it."""
    contents = [user(text) for text in texts]
    estimate = estimate_prompt_tokens(heuristic, real, last, contents)
    discount = request_script_discount(contents)
    assert estimate >= heuristic - discount
    if not discount or (real or 0) >= (last or 0):
        assert estimate >= int(heuristic * correction_factor(real, last))
    if heuristic > (last or 0):
        assert estimate >= (real or 0) + (heuristic - last if real and last else 0)
