"""Talks in other scripts: counts far below bytes / 4 are believed, none overflows.

A strict provider counts by BPE (o200k_base), which takes half as many tokens for each
byte of Russian or Hindi as for English, and several times as many for base64.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.context_filter_plugin import ContextFilterPlugin

from contextguard_adk import Threshold
from contextguard_adk._measuring.tokens import text_bytes
from contextguard_adk.telemetry import CallRecord
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import Chat, call_part, queued_tool
from tests.chats import agent_requests, guarded_chat

WINDOW = 12_000

# Each about an old printing press in a hall, and a key that nobody has.
SENTENCES = {
    "Russian": "Старый пресс стоит в зале Б, и никто не знает, у кого сейчас ключ. ",
    "Arabic": "المطبعة القديمة موجودة في القاعة ولا أحد يعرف من لديه المفتاح الآن. ",
    "Hindi": "पुराना प्रेस बड़े हॉल में रखा है और कोई नहीं जानता कि चाबी किसके पास है। ",
    "Thai": "เครื่องพิมพ์เก่าอยู่ในห้องโถงใหญ่ และไม่มีใครรู้ว่าตอนนี้ใครมีกุญแจ ",
}
ENGLISH = "The old press stands in hall B, and nobody knows who has the key to it now. "

RANDOM = random.Random(5)
ROWS = [{"id": i, "at": i * 7919, "load": i / 7, "on": True} for i in range(800)]
RESULTS = {
    "English": (ENGLISH * 600, 4.4),
    "JSON": (json.dumps(ROWS), 2.1),
    "base64": (base64.b64encode(RANDOM.randbytes(30_000)).decode(), 1.5),
    "digits": ("\n".join(f"{RANDOM.gauss(240, 80):.3f}" for _ in range(5_000)), 1.9),
}
"""Texts with their characters for each token."""


def cut_result(kind: str, share: float) -> str:
    """A result that takes about that share of the window."""
    text, token_chars = RESULTS[kind]
    return text[: int(WINDOW * share * token_chars)]


def guarded(
    script: Any = None,
    results: list[str] | None = None,
    records: list[CallRecord] | None = None,
    **agent: Any,
) -> tuple[Chat, SimulatedLlm]:
    """A chat whose model answers in a word or by a script, with a tool."""
    llm = SimulatedLlm(context_window=WINDOW, script=script or (lambda _: "Да."))
    agent = {"tools": [queued_tool("fetch", results or [""])], **agent}
    guard = {} if records is None else {"on_call": records.append}
    strategy = Threshold(context_window=WINDOW, preview_tokens=None)
    return guarded_chat(llm, strategy, guard=guard, agent=agent), llm


async def fill(chat: Chat, llm: SimulatedLlm, text: str) -> None:
    """Talks until the last request took most of the threshold."""
    while not llm.requests or llm.requests[-1].prompt_tokens < 0.72 * WINDOW:
        assert not llm.summaries
        await chat.say(text * 20)


def fetcher() -> Callable[[LlmRequest], Reply]:
    """A model that calls the tool once for each "Fetch", else answers in a word."""
    fetched = set[str]()

    def answer(request: LlmRequest) -> Reply:
        parts = request.contents[-1].parts or []
        text = parts[-1].text or ""
        if not text.startswith("Fetch") or text in fetched:
            return "Да."
        fetched.add(text)
        return call_part("fetch")

    return answer


@pytest.mark.parametrize(
    ("script", "kind"),
    [("Russian", "English"), ("Arabic", "JSON"), ("Hindi", "base64")],
)
async def test_dense_result_after_a_talk_in_another_script_is_not_refused(
    script: str, kind: str
) -> None:
    """The low count of the script says nothing of the result that came after it."""
    records: list[CallRecord] = []
    chat, llm = guarded(fetcher(), [cut_result(kind, 0.35)], records)
    await fill(chat, llm, SENTENCES[script])
    await chat.say("Fetch.")
    asked, fetched = records[-2:]
    assert not llm.rejections
    assert asked.estimated_tokens == pytest.approx(asked.real_tokens, rel=0.1)
    assert fetched.estimated_tokens > 0.9 * (fetched.real_tokens or 0)


@pytest.mark.parametrize("script", SENTENCES)
async def test_result_in_another_script_after_english_is_not_refused(
    script: str,
) -> None:
    """Text of another script counts bytes / 4 when it comes, and less once counted."""
    records: list[CallRecord] = []
    chat, llm = guarded(fetcher(), [SENTENCES[script] * 250], records)
    await fill(chat, llm, ENGLISH)
    await chat.say("Fetch.")
    await chat.say("Well?")
    assert not llm.rejections
    for record in records[-2:]:
        assert record.estimated_tokens > 0.9 * (record.real_tokens or 0)


@pytest.mark.parametrize("script", ["Russian", "Thai"])
async def test_window_is_used_whatever_the_script(script: str) -> None:
    """The first compaction comes when the threshold is near in real tokens."""
    chat, llm = guarded()
    while not llm.summaries:
        await chat.say(SENTENCES[script] * 12)
    largest = max(request.prompt_tokens for request in agent_requests(llm))
    assert 0.72 * WINDOW < largest < 0.81 * WINDOW
    assert not llm.rejections


async def test_long_instruction_in_another_script_leaves_room_to_compact() -> None:
    """An instruction that takes half of its bytes / 4 is no reason to give up."""
    instruction = SENTENCES["Hindi"] * 215
    assert text_bytes(instruction) / 4 > 0.8 * WINDOW
    chat, llm = guarded(instruction=instruction)
    while not llm.summaries:
        assert len(llm.requests) < 40
        await chat.say(SENTENCES["Hindi"] * 12)
    assert not llm.rejections
    largest = max(request.prompt_tokens for request in agent_requests(llm))
    assert 0.74 * WINDOW < largest < 0.81 * WINDOW


async def test_dense_text_in_the_place_of_another_script_is_not_refused() -> None:
    """A filter that drops the old turns leaves a count that speaks of other text."""
    llm = SimulatedLlm(context_window=WINDOW, script=lambda _: "Да.")
    keep_two = ContextFilterPlugin(num_invocations_to_keep=2)
    chat = guarded_chat(llm, Threshold(context_window=WINDOW), before=[keep_two])
    for share in (0.4, 0.5, 0.6, 0.7):
        for _ in range(2):
            await chat.say(SENTENCES["Russian"] * 45)
        await chat.say(cut_result("JSON", share))
    assert llm.rejections == 0
