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
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.context_filter_plugin import ContextFilterPlugin
from google.genai import types

from contextguard_adk import ContextGuardPlugin, SlidingWindow, Strategy, Threshold
from contextguard_adk.measuring.tokens import estimate_contents_tokens, text_bytes
from contextguard_adk.telemetry import METADATA_KEY
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import Chat, call_part, guarded_agent, model, queued_tool

WINDOW_TOKENS = 12_000
STRATEGIES = (
    Threshold(context_window=WINDOW_TOKENS),
    SlidingWindow(context_window=WINDOW_TOKENS, max_turns=200),
)
by_strategy = pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=[type(strategy).__name__ for strategy in STRATEGIES]
)

# Each about an old printing press in a hall, and a key that nobody has.
SENTENCES = {
    "Russian": "Старый пресс стоит в зале Б, и никто не знает, у кого сейчас ключ. ",
    "Greek": "Το παλιό πιεστήριο είναι στην αίθουσα Β και κανείς δεν έχει το κλειδί. ",
    "Arabic": "المطبعة القديمة موجودة في القاعة ولا أحد يعرف من لديه المفتاح الآن. ",
    "Hindi": "पुराना प्रेस बड़े हॉल में रखा है और कोई नहीं जानता कि चाबी किसके पास है। ",
    "Thai": "เครื่องพิมพ์เก่าอยู่ในห้องโถงใหญ่ และไม่มีใครรู้ว่าตอนนี้ใครมีกุญแจ ",
    "Georgian": "ძველი საბეჭდი მანქანა დარბაზში დგას და არავინ იცის, ვინ გააღებს. ",
}
ENGLISH = "The old press stands in hall B, and nobody knows who has the key to it now. "

_RANDOM = random.Random(5)
RESULTS: dict[str, Any] = {
    "English": ENGLISH * 600,
    "JSON": json.dumps(
        [{"id": i, "at": i * 7919, "load": i / 7, "on": True} for i in range(800)]
    ),
    "rows": {"rows": [[i, i * 7919, i / 7] for i in range(1_500)]},
    "base64": base64.b64encode(_RANDOM.randbytes(30_000)).decode(),
    "digits": "\n".join(f"{_RANDOM.gauss(240, 80):.3f}" for _ in range(5_000)),
}


def cut_result(kind: str, share: float) -> Any:
    """A result that takes about that share of the window."""
    tokens = int(WINDOW_TOKENS * share)
    if kind == "rows":
        return {"rows": RESULTS[kind]["rows"][: tokens // 20]}
    chars = {"English": 4.4, "JSON": 2.1, "base64": 1.5, "digits": 1.9}
    return RESULTS[kind][: int(tokens * chars[kind])]


def count_calls(events: list[Any]) -> list[dict[str, Any]]:
    """What the guard noted on the answers, call by call."""
    return [
        event.custom_metadata[METADATA_KEY]
        for event in events
        if METADATA_KEY in (event.custom_metadata or {})
    ]


async def fill(chat: Chat, llm: SimulatedLlm, text: str, share: float) -> None:
    """Talks until the last request took that share of the window."""
    while not llm.requests or llm.requests[-1].prompt_tokens < share * WINDOW_TOKENS:
        assert not llm.summaries
        await chat.say(text * 20)


def guarded(llm: SimulatedLlm, strategy: Strategy, result: Any = "") -> Chat:
    """A chat with a guarded agent and a tool that returns the result."""
    plugin = ContextGuardPlugin(default=strategy)
    agent = guarded_agent(llm, [queued_tool("fetch", [result])])
    return Chat(agent, [plugin])


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
    [
        *(("Russian", "English"), ("Greek", "digits"), ("Arabic", "JSON")),
        *(("Hindi", "base64"), ("Thai", "rows"), ("Georgian", "base64")),
    ],
)
async def test_dense_result_after_a_talk_in_another_script_is_not_refused(
    script: str, kind: str
) -> None:
    """The low count of the script says nothing of the result that came after it."""
    for share in (0.5, 0.72):
        llm = SimulatedLlm(context_window=WINDOW_TOKENS, script=fetcher())
        chat = guarded(llm, STRATEGIES[0], cut_result(kind, 0.35))
        await fill(chat, llm, SENTENCES[script], share)
        [asked, fetched] = count_calls(await chat.say("Fetch."))
        assert not llm.rejections
        assert asked["estimate"] == pytest.approx(asked["real"], rel=0.1)
        assert fetched["estimate"] > 0.9 * fetched["real"]


@pytest.mark.parametrize("script", SENTENCES)
async def test_result_in_another_script_after_english_is_not_refused(
    script: str,
) -> None:
    """Text of another script counts bytes / 4 when it comes, and less once counted."""
    for share in (0.5, 0.72):
        llm = SimulatedLlm(context_window=WINDOW_TOKENS, script=fetcher())
        chat = guarded(llm, STRATEGIES[0], SENTENCES[script] * 250)
        await fill(chat, llm, ENGLISH, share)
        [_, fetched] = count_calls(await chat.say("Fetch."))
        [later] = count_calls(await chat.say("Well?"))
        assert not llm.rejections
        for noted in (fetched, later):
            assert noted["estimate"] > 0.9 * noted["real"]


@by_strategy
@pytest.mark.parametrize("script", ["Russian", "Hindi"])
async def test_mixed_talk_stays_inside_the_window(
    script: str, strategy: Strategy
) -> None:
    """Script and results of all kinds in turn, three windows of them."""
    kinds = [*RESULTS, *reversed(RESULTS)]
    results = [cut_result(kind, 0.2) for kind in kinds]
    llm = SimulatedLlm(context_window=WINDOW_TOKENS, script=fetcher())
    plugin = ContextGuardPlugin(default=strategy)
    agent = guarded_agent(llm, [queued_tool("fetch", results)])
    chat = Chat(agent, [plugin])
    for number, kind in enumerate(kinds):
        await chat.say(SENTENCES[script] * 30)
        await chat.say(f"Fetch {kind}, {number}.")
    assert llm.summaries
    assert not llm.rejections


@pytest.mark.parametrize("script", ["Russian", "Hindi", "Thai"])
async def test_window_is_used_whatever_the_script(script: str) -> None:
    """The first compaction comes when the threshold is near in real tokens."""
    llm = SimulatedLlm(context_window=WINDOW_TOKENS, script=lambda _: "Да.")
    chat = guarded(llm, STRATEGIES[0])
    while not llm.summaries:
        await chat.say(SENTENCES[script] * 12)
    largest = max(r.prompt_tokens for r in llm.requests if not r.is_summary)
    assert 0.72 * WINDOW_TOKENS < largest < 0.81 * WINDOW_TOKENS
    assert not llm.rejections


@pytest.mark.parametrize("script", ["Russian", "Hindi"])
async def test_count_that_no_script_explains_is_not_believed(script: str) -> None:
    """Where a provider leaves out what its cache held, bytes / 4 stay the floor."""
    usage = types.GenerateContentResponseUsageMetadata(prompt_token_count=120)
    odd = LlmResponse(content=model("Да."), usage_metadata=usage)
    llm = SimulatedLlm(
        context_window=WINDOW_TOKENS, script=lambda _: odd.model_copy(deep=True)
    )
    chat = guarded(llm, STRATEGIES[0])
    while not llm.summaries:
        await chat.say(SENTENCES[script] * 12)
    last = [record for record in llm.requests if not record.is_summary][-2]
    assert 0.7 < estimate_contents_tokens(last.contents) / WINDOW_TOKENS < 0.8
    assert not llm.rejections


async def test_instruction_in_another_script_is_part_of_what_explains_a_count() -> None:
    """A long instruction in Hindi does not keep a low count from being believed."""
    llm = SimulatedLlm(context_window=WINDOW_TOKENS, script=lambda _: "हाँ।")
    plugin = ContextGuardPlugin(default=Threshold(context_window=WINDOW_TOKENS))
    agent = guarded_agent(llm, instruction=SENTENCES["Hindi"] * 80)
    chat = Chat(agent, [plugin])
    await chat.say("नमस्ते")
    [noted] = count_calls(await chat.say(SENTENCES["Hindi"]))
    assert noted["estimate"] == pytest.approx(noted["real"], rel=0.1)


@pytest.mark.parametrize("script", SENTENCES)
async def test_honest_counts_of_a_script_are_no_truncation(
    script: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even where instruction and messages are in the thriftiest script."""
    llm = SimulatedLlm(context_window=200_000, script=lambda _: "Да.")
    plugin = ContextGuardPlugin(default=Threshold(context_window=200_000))
    agent = guarded_agent(llm, instruction=SENTENCES[script] * 150)
    chat = Chat(agent, [plugin])
    for _ in range(2):
        await chat.say(SENTENCES[script] * 200)
    assert llm.requests[-1].prompt_tokens > 8_000
    assert not [r for r in caplog.records if r.name == "contextguard_adk.usage"]


async def test_long_instruction_in_another_script_leaves_room_to_compact() -> None:
    """An instruction that takes half of its bytes / 4 is no reason to give up."""
    llm = SimulatedLlm(context_window=WINDOW_TOKENS, script=lambda _: "हाँ।")
    instruction = SENTENCES["Hindi"] * 215
    assert text_bytes(instruction) / 4 > 0.8 * WINDOW_TOKENS
    plugin = ContextGuardPlugin(default=STRATEGIES[0])
    chat = Chat(guarded_agent(llm, instruction=instruction), [plugin])
    for _ in range(40):
        await chat.say(SENTENCES["Hindi"] * 12)
    assert llm.summaries
    assert not llm.rejections
    sizes = [r.prompt_tokens for r in llm.requests if not r.is_summary]
    assert 0.74 * WINDOW_TOKENS < max(sizes) < 0.81 * WINDOW_TOKENS


@by_strategy
@pytest.mark.parametrize("script", ["Russian", "Hindi"])
async def test_dense_text_in_the_place_of_another_script_is_not_refused(
    script: str, strategy: Strategy
) -> None:
    """A filter that drops the old turns leaves a count that speaks of other text."""
    llm = SimulatedLlm(context_window=WINDOW_TOKENS, script=lambda _: "Да.")
    plugins = [
        ContextFilterPlugin(num_invocations_to_keep=2),
        ContextGuardPlugin(default=strategy),
    ]
    chat = Chat(guarded_agent(llm), plugins)
    for share in (0.4, 0.5, 0.6, 0.7):
        for _ in range(2):
            await chat.say(SENTENCES[script] * 45)
        await chat.say(cut_result("JSON", share))
    assert llm.rejections == 0


async def test_an_english_instruction_is_not_measured_by_a_russian_talk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An instruction that fills the window is reported, in whatever script."""
    llm = SimulatedLlm(context_window=WINDOW_TOKENS, script=lambda _: "Да.")
    instruction = "".join(f"Rule {i}: {ENGLISH}" for i in range(450))
    chat = Chat(
        guarded_agent(llm, instruction=instruction),
        [ContextGuardPlugin(default=STRATEGIES[0])],
    )
    for _ in range(3):
        await chat.say(SENTENCES["Russian"] * 8)
    said = [r for r in caplog.records if "compaction cannot help" in r.getMessage()]
    assert len(said) == 1
    assert not llm.summaries
