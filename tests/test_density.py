"""The shape of a text tells how many tokens it takes."""

import argparse
import base64
import inspect
import json
import random
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks._common import make_pod
from contextguard_adk._measuring.density import (
    SizedText,
    estimate_text_density,
    script_discount_tokens,
    weighted_tokens,
)
from contextguard_adk._measuring.tokens import text_bytes
from contextguard_adk.testing.provider import count_tokens

PROSE = (
    "The lighthouse had been dark for eleven years when Marta bought it. The roof let "
    "in the rain, the lamp was gone, and the road along the cliff ended two hundred "
    "metres short of the door. She carried everything up by hand: boards, paint, a "
    "stove in four parts. In the evenings she wrote to her brother. "
)


def declaration(language: str) -> str:
    """The Universal Declaration of Human Rights in a language."""
    folder = Path(__file__).parent.parent / "benchmarks" / "udhr"
    return (folder / f"{language}.txt").read_text("utf-8")


def make_texts() -> dict[str, str]:
    """Texts of the kinds that conversations and tool results are made of."""
    rng = random.Random(9)
    data = rng.randbytes(3_000)
    numbers = [[round(rng.gauss(0, 100), 4) for _ in range(8)] for _ in range(60)]
    users = [
        {"id": rng.randrange(10**6), "email": f"user{i}@example.com", "active": True}
        for i in range(80)
    ]
    return {
        "prose": PROSE * 3,
        "python": inspect.getsource(argparse)[10_000:22_000],
        "csv": "\n".join(",".join(map(str, row)) for row in numbers),
        "rows-json": json.dumps(users, separators=(",", ":")),
        "kubectl-pretty": json.dumps(
            [make_pod(random.Random(i)) for i in range(12)], indent=4
        ),
        "log": "\n".join(
            f"2024-03-01 09:{i % 60:02d}:41,{i:03d} INFO [billing.api:{i}] charged "
            f"invoice={i * 7919} took {i / 7:.3f}s request_id={data[i : i + 8].hex()}"
            for i in range(90)
        ),
        "base64": base64.b64encode(data).decode(),
        "russian": declaration("ru")[:3_000],
        "chinese": declaration("zh")[:2_000],
        "emoji": "🚀🔥👍😀🎉" * 60,
        "box": "┌──────────────┬──────────────────┐\n│ a            │ b  │\n" * 9,
    }


TEXTS = make_texts()


@pytest.mark.parametrize("kind", [*TEXTS, "mixed"])
def test_density_is_near_what_the_tokenizer_counts(kind: str) -> None:
    """ASCII is judged within 10 %, other scripts within 20 %, all kinds within 5 %."""
    text = TEXTS.get(kind, "\n".join(TEXTS.values()))
    counted = count_tokens([text], None) * 4 / text_bytes(text)
    allowed = 0.05 if kind == "mixed" else 0.1 if text.isascii() else 0.2
    assert estimate_text_density(text) == pytest.approx(counted, rel=allowed)


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("x" * 40_000, 0.5),
        (json.dumps({"result": "x" * 4_000}), 0.6),
        ("-" * 4_000, 0.1),
        (" " * 4_000, 0.1),
        ("word " * 4_000, 0.9),
    ],
)
def test_density_of_repetition_is_low(text: str, most: float) -> None:
    """Repeated characters merge into long tokens."""
    assert 0.1 <= estimate_text_density(text) <= most


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(alphabet=st.characters(), max_size=200), st.integers(0, 3))
def test_density_of_any_text_is_bounded(text: str, cut: int) -> None:
    """No text, not even one cut inside a character, is beyond the bounds."""
    data = text.encode("utf-8", "surrogatepass")
    assert estimate_text_density(text) == estimate_text_density(data)
    assert 0.1 <= estimate_text_density(data[cut:]) <= 8.0


DENSE = base64.b64encode(random.Random(2).randbytes(3_000))


@pytest.mark.parametrize(
    ("parts", "heuristic_tokens", "weighted"),
    [
        ([], 500, 500),
        ([(b"", 400)], 100, 100),
        ([(DENSE, 0)], 1_000, 2_700),
        ([(DENSE, 4_000)], 2_000, 3_700),
        ([(DENSE, 0)], 1_500, 3_200),
        ([(b"word " * 800 + DENSE, 0)], 1_000, 2_700),
        ([(DENSE, 0), (b"word " * 800, 0)], 1_000, 2_700),
    ],
)
def test_weighted_tokens_follow_the_density(
    parts: list[tuple[bytes, int]], heuristic_tokens: int, weighted: int
) -> None:
    """Text counts by its density, everything else by its heuristic."""
    sized = [SizedText(len(text), other, partial(bytes, text)) for text, other in parts]
    assert weighted_tokens(sized, heuristic_tokens) == pytest.approx(weighted, rel=0.06)


@pytest.mark.parametrize("name", ["ru", "ar", "hi"])
def test_discount_tokens_leave_no_more_than_the_text_takes(name: str) -> None:
    """What a script takes at best is close below what real text takes."""
    text = declaration(name)
    least_tokens = text_bytes(text) / 4 - script_discount_tokens(text.encode())
    assert 0.7 < least_tokens / count_tokens([text], None) < 1.0


@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        "Größe, façade, señor, smörgåsbord " * 9,
        declaration("zh"),
        "오래된 인쇄기는 홀에 있다 " * 9,
        "🙂🚀 → “…” " * 9,
    ],
)
def test_other_text_has_no_discount_tokens(text: str) -> None:
    """Where a script takes bytes / 4 or more nothing is lowered."""
    assert script_discount_tokens(text.encode()) == 0.0
