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
from google.genai import types

from benchmarks._common import make_pod
from contextguard_adk import CallRecord, Threshold
from contextguard_adk._measuring.calibration import (
    MeasuredRequest,
    estimate_prompt_tokens,
    token_counter,
)
from contextguard_adk._measuring.tokens import (
    estimate_contents_tokens,
    text_bytes,
)
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing.provider import count_tokens
from tests.builders import Chat, call_part, queued_tool, user
from tests.chats import agent_requests, guarded_chat

CHANCE = random.Random(5)
# Each about an old printing press in a hall, and a key that nobody has.
SENTENCES = {
    "Russian": "Старый пресс стоит в зале Б, и никто не знает, у кого сейчас ключ. ",
    "Hindi": "पुराना प्रेस बड़े हॉल में रखा है और कोई नहीं जानता कि चाबी किसके पास है। ",
    "Thai": "เครื่องพิมพ์เก่าอยู่ในห้องโถงใหญ่ และไม่มีใครรู้ว่าตอนนี้ใครมีกุญแจ ",
}
ENGLISH = "The old press stands in hall B, and nobody knows who has the key to it now. "
PROSE = ENGLISH * 200
DENSE = base64.b64encode(CHANCE.randbytes(30_000)).decode()
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
    return estimate_prompt_tokens(MeasuredRequest(contents, size), correction=0.0)


@pytest.mark.parametrize("kind", [*TEXTS, "mixed"])
def test_a_text_is_estimated_near_what_a_tokenizer_counts(kind: str) -> None:
    """ASCII within 12 %, other scripts within 20 %, also where nobody has counted."""
    text = TEXTS.get(kind, "\n".join(TEXTS.values()))
    counted = count_tokens([text], None)
    near = pytest.approx(counted, rel=0.12 if text.isascii() else 0.2)
    assert estimate(user(text)) == near
    assert token_counter(None)(text) == near
    assert token_counter(2.0)(text) >= text_bytes(text) / 2


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
    for sentences in (20, 70, 70, 70, 70):
        await chat.say(talk * sentences)
    while llm.requests[-1].prompt_tokens < 0.72 * WINDOW:
        assert not llm.summaries
        await chat.say(talk * 20)

    await chat.say("Fetch.")
    await chat.say("Well?")
    assert not llm.rejections

    asked, fetched, later = records[-3:]
    assert asked.estimated_tokens == pytest.approx(asked.real_tokens, rel=0.1)

    for record in (fetched, later):
        assert record.estimated_tokens > 0.9 * (record.real_tokens or 0)


@pytest.mark.parametrize(
    ("script", "instruction", "large"), [("Thai", 0, 110), ("Hindi", 215, 60)]
)
async def test_the_window_is_used_whatever_the_script(
    script: str, instruction: int, large: int
) -> None:
    """The first compaction comes when the threshold is near in real tokens."""
    text = SENTENCES[script] * instruction
    assert not text or text_bytes(text) / 4 > 0.8 * WINDOW

    chat, llm = open_chat(instruction=text or "You help.")
    for sentences in (12, large, large):
        await chat.say(SENTENCES[script] * sentences)
    while not llm.summaries:
        assert len(llm.requests) < 20
        await chat.say(SENTENCES[script] * 12)

    largest = max(request.prompt_tokens for request in agent_requests(llm))
    assert 0.72 * WINDOW < largest < 0.81 * WINDOW
    assert not llm.rejections


# --- Families of models -----------------------------------------------------------

FAMILIES = {
    "gpt-5.2": 1.0,
    "house-model": 1.0,
    "gemini-flash-latest": 1.06,
    "ollama_chat/gemma3:4b": 1.06,
    "qwen3-32b": 1.01,
    "deepseek-r1-distill-qwen-32b": 1.01,
    "openrouter/deepseek/deepseek-v3.2": 1.05,
    "claude-3-5-sonnet-20241022": 1.5 / 1.15,
    "claude-opus-4@20250514": 1.5 / 1.15,
    "anthropic.claude-opus-4-6-v1:0": 1.5 / 1.15,
    "claude-opus-4-6": 1.5 / 1.15,
    "claude-opus-4-7": 1.47,
    "anthropic/claude-sonnet-5": 1.47,
    "claude-in-house": 1.47,
}
"""What the first estimate is multiplied by, compared with an unknown model."""


async def estimate_first(model: str, text: str) -> int:
    """What a message takes by the first estimate for a model."""
    records = list[CallRecord]()
    llm = SimulatedLlm(model=model, context_window=WINDOW)
    strategy = Threshold(context_window=WINDOW)
    chat = guarded_chat(llm, strategy, guard={"on_call": records.append})
    await chat.say(text)
    return records[0].estimated_tokens


@pytest.mark.parametrize(("model", "factor"), FAMILIES.items(), ids=FAMILIES)
async def test_the_name_of_a_model_tells_how_many_tokens_it_takes(
    model: str, factor: float
) -> None:
    """A family takes its factor; an unknown model takes the tokens of o200k_base."""
    text = ENGLISH * 40
    usual_tokens = await estimate_first("unknown", text)
    tokens = await estimate_first(model, text)
    assert tokens == pytest.approx(factor * usual_tokens, rel=0.01)


@pytest.mark.quick("qwen3-coder")
@pytest.mark.parametrize("model", ["gemini-pro-latest", "qwen3-coder", "gpt-5.2"])
async def test_a_first_request_full_of_digits_is_not_refused(model: str) -> None:
    """Whether a model takes a token for each digit, or for three of them."""
    text = "\n".join(f"{n},{CHANCE.randrange(10**9, 10**10)}" for n in range(600))
    tokens = count_tokens([text], None)
    if model != "gpt-5.2":
        tokens = sum(char.isdigit() or char in ",\n" for char in text)
    token_ratio = tokens / (len(text) / 4)

    for part in (0.7, 0.95, 1.2):
        llm = SimulatedLlm(model=model, context_window=WINDOW, token_ratio=token_ratio)
        chat = guarded_chat(llm, Threshold(context_window=WINDOW))
        size = int(part * WINDOW * 4 / token_ratio)
        await chat.tell([user("Read this."), user((text * 3)[:size])])
        await chat.say("What does it say?")
        assert llm.rejections == 0


async def test_a_count_makes_the_family_irrelevant() -> None:
    """From the second call on, models with equal counts have equal estimates."""
    estimates = list[int]()
    for model in ("gemini-flash-latest", "claude-opus-4-8", "unknown"):
        records = list[CallRecord]()
        llm = SimulatedLlm(model=model, context_window=WINDOW)
        strategy = Threshold(context_window=WINDOW)
        chat = guarded_chat(llm, strategy, guard={"on_call": records.append})
        for _ in range(2):
            await chat.say(ENGLISH * 20)
        estimates.append(records[1].estimated_tokens)

    assert len({*estimates}) == 1
