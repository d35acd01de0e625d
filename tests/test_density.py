"""The shape of a text tells how many tokens it takes."""

# ruff: noqa: RUF001

import argparse
import base64
import importlib.util
import inspect
import json
import random
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks._common import make_pod
from contextguard_adk.measuring.density import (
    SizedText,
    estimate_text_density,
    script_discount_tokens,
    weighted_tokens,
)
from contextguard_adk.measuring.tokens import text_bytes

# A machine under load is no reason to fail.
unhurried = settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)

PROSE = (
    "The lighthouse had been dark for eleven years when Marta bought it. The roof let "
    "in the rain, the lamp was gone, and the road along the cliff ended two hundred "
    "metres short of the door. She carried everything up by hand: boards, paint, a "
    "stove in four parts. In the evenings she wrote to her brother, who thought that "
    "she had lost her mind, and in the mornings she went on with the stairs.\n\n"
    "By autumn there was glass in the windows again. Fishermen who passed below began "
    "to wave, and one of them left a bag of onions at the gate. She never learned who. "
)
RUSSIAN = (
    "Когда Марта купила маяк, он не горел уже одиннадцать лет. Крыша протекала, лампы "
    "не было, а дорога вдоль обрыва кончалась в двухстах метрах от двери. Она носила "
    "всё наверх руками: доски, краску, печь. По вечерам она писала брату, а утром "
    "снова принималась за лестницу. "
)
CHINESE = (
    "玛尔塔买下这座灯塔的时候,它已经熄灭了十一年。屋顶漏雨,灯不见了,沿着悬崖的路在离门"
    "两百米的地方就断了。她用手把所有东西搬上去:木板、油漆、一个炉子。晚上她给弟弟写信,"
    "早上又继续修楼梯。到了秋天,窗户上又有了玻璃。"
)
JAPANESE = (
    "マルタがこの灯台を買ったとき、灯は十一年も消えたままだった。屋根は雨漏りし、ランプは"
    "なくなり、崖沿いの道は扉の二百メートル手前で終わっていた。彼女はすべてを手で運び上げた。"
    "夜は弟に手紙を書き、朝になるとまた階段の修理を続けた。"
)


def make_pods() -> dict[str, Any]:
    """A list of pods in the shape of `kubectl get pods -o json`."""
    return {"kind": "List", "items": [make_pod(random.Random(i)) for i in range(12)]}


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
        "python-in-json": json.dumps({"result": inspect.getsource(json.decoder)}),
        "digits": "".join(rng.choices("0123456789", k=4_000)),
        "csv": "\n".join(",".join(map(str, row)) for row in numbers),
        "rows-json": json.dumps(users, separators=(",", ":")),
        "kubectl-pretty": json.dumps(make_pods(), indent=4),
        "kubectl-compact": json.dumps(make_pods(), separators=(",", ":")),
        "log": "\n".join(
            f"2024-03-01 09:{i % 60:02d}:41,{i:03d} INFO [billing.api:{i}] charged "
            f"invoice={i * 7919} took {i / 7:.3f}s request_id={data[i : i + 8].hex()}"
            for i in range(90)
        ),
        "base64": base64.b64encode(data).decode(),
        "hex": data.hex(),
        "uuid": "\n".join(str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(99)),
        "upper": PROSE.upper(),
        "russian": RUSSIAN * 3,
        "chinese": CHINESE * 3,
        "japanese": JAPANESE * 3,
        "emoji": "🚀🔥👍😀🎉" * 60,
        "box": "┌──────────────┬──────────────────┐\n│ a            │ b  │\n" * 9,
    }


TEXTS = make_texts()


@pytest.fixture(scope="module")
def o200k() -> Iterator[tiktoken.Encoding]:
    """The tokenizer itself, from the copy that LiteLLM ships."""
    spec = importlib.util.find_spec("litellm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "litellm_core_utils" / "tokenizers"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield tiktoken.get_encoding("o200k_base")


def real_density(encoding: tiktoken.Encoding, text: str) -> float:
    """Tokens per four bytes as the tokenizer counts them."""
    return len(encoding.encode_ordinary(text)) * 4 / text_bytes(text)


@pytest.mark.parametrize("kind", TEXTS)
def test_density_is_near_what_the_tokenizer_counts(
    o200k: tiktoken.Encoding, kind: str
) -> None:
    """ASCII is judged within 10 %, other scripts within 20 %."""
    text = TEXTS[kind]
    assert estimate_text_density(text) == pytest.approx(
        real_density(o200k, text), rel=0.1 if text.isascii() else 0.2
    )


def test_density_of_mixed_text_is_near_too(o200k: tiktoken.Encoding) -> None:
    """All kinds in one text are judged within 5 %, by a bounded sample."""
    text = "\n".join(TEXTS.values())
    assert estimate_text_density(text) == pytest.approx(
        real_density(o200k, text), rel=0.05
    )


def test_density_of_no_text_is_neutral() -> None:
    """An empty text neither raises nor lowers an estimate."""
    assert estimate_text_density("") == 1.0


@pytest.mark.parametrize(
    ("text", "most"),
    [
        pytest.param("x" * 40_000, 0.5, id="one-letter"),
        pytest.param(json.dumps({"result": "x" * 4_000}), 0.6, id="letter-in-json"),
        pytest.param("-" * 4_000, 0.1, id="rule"),
        pytest.param(" " * 4_000, 0.1, id="spaces"),
        pytest.param("word " * 4_000, 0.9, id="word"),
    ],
)
def test_density_of_repetition_is_low(text: str, most: float) -> None:
    """Repeated characters merge into long tokens."""
    assert 0.1 <= estimate_text_density(text) <= most


@unhurried
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
        pytest.param([], 500, 500, id="nothing-to-judge"),
        pytest.param([(b"", 400)], 100, 100, id="media"),
        pytest.param([(DENSE, 0)], 1_000, 2_700, id="dense"),
        pytest.param([(DENSE, 4_000)], 2_000, 3_700, id="dense-beside-media"),
        pytest.param([(DENSE, 0)], 1_500, 3_200, id="dense-beside-tools"),
        pytest.param([(b"word " * 800 + DENSE, 0)], 1_000, 2_700, id="end-of-a-part"),
        pytest.param([(DENSE, 0), (b"word " * 800, 0)], 1_000, 2_700, id="newest"),
    ],
)
def test_weighted_tokens_follow_the_density(
    parts: list[tuple[bytes, int]], heuristic_tokens: int, weighted: int
) -> None:
    """Text counts by its density, everything else by its heuristic."""
    sized = [SizedText(len(text), other, partial(bytes, text)) for text, other in parts]
    assert weighted_tokens(sized, heuristic_tokens) == pytest.approx(weighted, rel=0.06)


@pytest.mark.parametrize(
    ("count", "size_bytes", "most_reads"),
    [(1, 2_000_000, 1), (1_000, 4_000, 48), (90, 100, 90)],
    ids=["one-large", "many", "short"],
)
def test_only_parts_in_the_sample_are_read(
    count: int, size_bytes: int, most_reads: int
) -> None:
    """To write a result as JSON takes time; each is written once at most."""
    reads: list[bytes] = []

    def read(text: bytes) -> bytes:
        reads.append(text)
        return text

    repeats = size_bytes // 3_000 + 1
    texts = [DENSE[start : start + 3_000] * repeats for start in range(count)]
    parts = [SizedText(size_bytes, 0, partial(read, t[:size_bytes])) for t in texts]
    weighted = weighted_tokens(parts, count * size_bytes // 4)
    assert weighted == pytest.approx(2.7 * count * size_bytes / 4, rel=0.06)
    assert 0 < len(reads) <= most_reads


@unhurried
@given(st.lists(st.binary(min_size=1, max_size=300)), st.integers(0, 3_000))
def test_parts_are_judged_like_one_text(texts: list[bytes], heuristic: int) -> None:
    """The newest that the heuristic covers, line by line, of the last its end."""
    sized = [SizedText(len(text), 0, partial(bytes, text)) for text in texts]
    missing_bytes, taken = heuristic * 4, []
    for text in texts:
        taken.append(text[max(len(text) - missing_bytes, 0) :])
        missing_bytes -= len(text)
        if missing_bytes <= 0:
            break
    density = estimate_text_density(b"\n".join(taken))
    weighted = heuristic + sum(map(len, taken)) / 4 * (density - 1)
    assert weighted_tokens(sized, heuristic) == pytest.approx(weighted)


# --- script discounts


@pytest.mark.parametrize("name", ["ru", "ar", "hi"])
def test_discount_tokens_leave_no_more_than_the_text_takes(
    name: str, o200k: tiktoken.Encoding
) -> None:
    """What a script takes at best is close below what real text takes."""
    folder = Path(__file__).parent.parent / "benchmarks" / "udhr"
    text = (folder / f"{name}.txt").read_bytes()
    least_tokens = len(text) / 4 - script_discount_tokens(text)
    tokens = len(o200k.encode_ordinary(text.decode()))
    assert 0.7 < least_tokens / tokens < 1.0


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param(PROSE, id="English"),
        pytest.param("Größe, façade, señor, smörgåsbord " * 9, id="Latin"),
        pytest.param(CHINESE, id="Chinese"),
        pytest.param(JAPANESE, id="Japanese"),
        pytest.param("오래된 인쇄기는 홀에 있다 " * 9, id="Korean"),
        pytest.param("🙂🚀 → “…” " * 9, id="symbols"),
    ],
)
def test_other_text_has_no_discount_tokens(text: str) -> None:
    """Where a script takes bytes / 4 or more nothing is lowered."""
    assert script_discount_tokens(text.encode()) == 0.0


def test_discount_tokens_of_a_long_text_are_judged_by_slices() -> None:
    """A long text has as many for each byte as its part, and the mixed one half."""
    one = RUSSIAN.encode()
    each = script_discount_tokens(one) / len(one)
    assert script_discount_tokens(one * 500) == pytest.approx(
        each * len(one) * 500, 0.05
    )
    mixed = one * 500 + b"x" * len(one) * 500
    assert script_discount_tokens(mixed) == pytest.approx(each * len(one) * 500, 0.1)
