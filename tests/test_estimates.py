"""Estimates of prompt tokens: what they promise for texts of any kind and script.

A provider that counts by BPE (o200k_base) takes half as many tokens for each byte of
Russian or Hindi as for English, and several times as many for base64.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.context_filter_plugin import ContextFilterPlugin
from google.genai import types
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks._common import make_pod
from contextguard_adk import CallRecord, Threshold
from contextguard_adk._measuring.calibration import (
    estimate_prompt_tokens,
    token_counter,
)
from contextguard_adk._measuring.tokens import (
    estimate_config_tokens,
    estimate_contents_tokens,
    text_bytes,
)
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing.provider import count_tokens
from tests.builders import Chat, call_part, model, queued_tool, response, user
from tests.chats import agent_requests, guarded_chat

CHANCE = random.Random(5)
# Each about an old printing press in a hall, and a key that nobody has.
SENTENCES = {
    "Russian": "Старый пресс стоит в зале Б, и никто не знает, у кого сейчас ключ. ",
    "Hindi": "पुराना प्रेस बड़े हॉल में रखा है और कोई नहीं जानता कि चाबी किसके पास है। ",
    "Thai": "เครื่องพิมพ์เก่าอยู่ในห้องโถงใหญ่ และไม่มีใครรู้ว่าตอนนี้ใครมีกุญแจ ",
}
ENGLISH = "The old press stands in hall B, and nobody knows who has the key to it now. "
PROSE, RUSSIAN = ENGLISH * 200, SENTENCES["Russian"] * 100
DENSE = base64.b64encode(CHANCE.randbytes(30_000)).decode()
NUMBERS = [{"id": i, "at": i * 7919, "load": i / 7, "on": True} for i in range(800)]
UDHR = Path(__file__).parent.parent / "benchmarks" / "udhr"


def declaration(language: str) -> str:
    """The Universal Declaration of Human Rights in a language."""
    return (UDHR / f"{language}.txt").read_text("utf-8")


TEXTS = {
    "prose": PROSE,
    "csv": "\n".join(f"{CHANCE.gauss(0, 100):.4f},{n},on" for n in range(400)),
    "kubectl": json.dumps([make_pod(random.Random(i)) for i in range(12)], indent=4),
    "base64": DENSE,
    "russian": declaration("ru")[:3_000],
    "chinese": declaration("zh")[:2_000],
    "emoji": "🚀🔥👍😀🎉" * 60,
}


def estimate(*contents: types.Content, tokens: int | None = None) -> int:
    """What contents take, judged by their texts alone, of which the end may count."""
    size = estimate_contents_tokens(contents) if tokens is None else tokens
    return estimate_prompt_tokens(size, None, None, contents, default=0.0)


@pytest.mark.parametrize("kind", [*TEXTS, "mixed"])
def test_a_text_is_estimated_near_what_a_tokenizer_counts(kind: str) -> None:
    """ASCII within 12 %, other scripts within 20 %, also where nobody has counted."""
    text = TEXTS.get(kind, "\n".join(TEXTS.values()))
    counted = count_tokens([text], None)
    near = pytest.approx(counted, rel=0.12 if text.isascii() else 0.2)
    assert estimate(user(text)) == near
    assert token_counter(None)(text) == near
    assert token_counter(2.0)(text) >= text_bytes(text) / 2


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(alphabet=st.characters(), max_size=200))
def test_the_estimate_of_any_text_is_bounded(text: str) -> None:
    """No text, whatever it is made of, takes more than two tokens for each byte."""
    assert bool(text) <= token_counter(None)(text) <= 2 * text_bytes(text) + 1


IMAGE = types.Part(inline_data=types.Blob(mime_type="image/png", data=b"\0" * 9))
IMAGES = types.Content(role="user", parts=[IMAGE] * 18)
ROWS = {"rows": [[i, i * 7919] for i in range(800)]}
WEIGHTS: dict[str, tuple[list[types.Content], int | None, float, float]] = {
    "prose": ([user(PROSE)], None, 0.9, 1.0),
    "base64": ([user(DENSE)], None, 2.4, 2.9),
    "result": ([response("read", DENSE)], None, 2.4, 2.9),
    "numbers": ([response("rows", ROWS)], None, 1.4, 2.3),
    "one letter": ([user("x" * 40_000)], None, 0.05, 0.5),
    "blanks": ([user(" " * 4_000)], None, 0.01, 0.15),
    "media": ([IMAGES], None, 1.0, 1.0),
    "no content": ([], 500, 1.0, 1.0),
    "more than contents": ([user(DENSE)], 20_000, 1.7, 1.95),
    "last content": ([user(DENSE), user(PROSE)], 1_000, 0.9, 1.0),
}


@pytest.mark.parametrize(
    ("contents", "tokens", "least", "most"), WEIGHTS.values(), ids=WEIGHTS
)
def test_every_part_counts_by_its_own_text(
    contents: list[types.Content], tokens: int | None, least: float, most: float
) -> None:
    """Media and what is no content, as the tools are, stay as their size says."""
    size = tokens or estimate_contents_tokens(contents)
    assert least <= estimate(*contents, tokens=tokens) / size <= most


@pytest.mark.parametrize(
    ("heuristic", "real", "last", "tokens"),
    [
        pytest.param(150_008, 100_000, 50_000, 300_016, id="massive-tool-result"),
        pytest.param(1_000, None, None, 1_500, id="first-turn"),
        pytest.param(1_000, 0, 100, 1_500, id="usage-of-zero"),
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
    for contents in ([], [user(PROSE), model(PROSE)]):
        assert estimate_prompt_tokens(heuristic, real, last, contents) == tokens


SCRIPTS = {
    **{name: (declaration(name), True) for name in ("ru", "ar", "hi")},
    "english": (PROSE, False),
    "chinese": (declaration("zh"), False),
    "symbols": ("🙂🚀 → “…” " * 9, False),
}


@pytest.mark.parametrize("where", ["message", "instruction"])
@pytest.mark.parametrize(("text", "is_explained"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_low_count_is_believed_where_the_script_explains_it(
    where: str, text: str, is_explained: bool
) -> None:
    """Wherever the text stands; a count that nothing explains leaves something out."""
    config, contents = types.GenerateContentConfig(), [user(text)]
    if where == "instruction":
        config.system_instruction, contents = text, []
    size = estimate_contents_tokens(contents) + estimate_config_tokens(config)
    counted = count_tokens([text], None) if is_explained else int(size * 0.8)
    for real, is_believed in ((counted, is_explained), (counted // 2, False)):
        found = estimate_prompt_tokens(size, real, size, contents, config=config)
        assert found == (real if is_believed else size)


# --- Talks ------------------------------------------------------------------------

WINDOW = 12_000


def open_chat(
    result: str = "", on_call: Any = None, **agent: Any
) -> tuple[Chat, SimulatedLlm]:
    """A chat whose model answers in a word, and calls its tool at each new "Fetch"."""
    fetched = set[str]()

    def answer(request: LlmRequest) -> Reply:
        text = (request.contents[-1].parts or [types.Part()])[-1].text or ""
        if not text.startswith("Fetch") or text in fetched:
            return "Да."
        fetched.add(text)
        return call_part("fetch")

    llm = SimulatedLlm(context_window=WINDOW, script=answer)
    strategy = Threshold(context_window=WINDOW, preview_tokens=None)
    agent = {"tools": [queued_tool("fetch", [result])], **agent}
    return guarded_chat(llm, strategy, guard={"on_call": on_call}, agent=agent), llm


TALKS = {
    "russian, prose": (SENTENCES["Russian"], (ENGLISH * 600)[:18_480]),
    "hindi, base64": (SENTENCES["Hindi"], DENSE[:6_300]),
    "prose, thai": (ENGLISH, SENTENCES["Thai"] * 250),
}
"""What is said, and a result that takes a third of the window or more."""


@pytest.mark.parametrize(("talk", "result"), TALKS.values(), ids=TALKS)
async def test_a_result_of_another_kind_than_the_talk_is_not_refused(
    talk: str, result: str
) -> None:
    """The counts of the one say nothing of the other; each is near once counted."""
    records: list[CallRecord] = []
    chat, llm = open_chat(result, records.append)
    while not llm.requests or llm.requests[-1].prompt_tokens < 0.72 * WINDOW:
        assert not llm.summaries
        await chat.say(talk * 20)
    await chat.say("Fetch.")
    await chat.say("Well?")
    assert not llm.rejections
    asked, fetched, later = records[-3:]
    assert asked.estimated_tokens == pytest.approx(asked.real_tokens, rel=0.1)
    for record in (fetched, later):
        assert record.estimated_tokens > 0.9 * (record.real_tokens or 0)


@pytest.mark.parametrize(("script", "instruction"), [("Thai", 0), ("Hindi", 215)])
async def test_the_window_is_used_whatever_the_script(
    script: str, instruction: int
) -> None:
    """The first compaction comes when the threshold is near in real tokens, also where
    the bytes / 4 of the instruction alone would take the room."""
    text = SENTENCES[script] * instruction
    assert not text or text_bytes(text) / 4 > 0.8 * WINDOW
    chat, llm = open_chat(instruction=text or "You help.")
    while not llm.summaries:
        assert len(llm.requests) < 40
        await chat.say(SENTENCES[script] * 12)
    largest = max(request.prompt_tokens for request in agent_requests(llm))
    assert 0.72 * WINDOW < largest < 0.81 * WINDOW
    assert not llm.rejections


async def test_dense_text_in_the_place_of_another_script_is_not_refused() -> None:
    """A filter that drops the old turns leaves a count that speaks of other text."""
    llm = SimulatedLlm(context_window=WINDOW, script=lambda _: "Да.")
    keep_two = ContextFilterPlugin(num_invocations_to_keep=2)
    chat = guarded_chat(llm, Threshold(context_window=WINDOW), before=[keep_two])
    for share in (0.4, 0.5, 0.6, 0.7):
        for _ in range(2):
            await chat.say(SENTENCES["Russian"] * 45)
        await chat.say(json.dumps(NUMBERS)[: int(WINDOW * share * 2.1)])
    assert llm.rejections == 0
