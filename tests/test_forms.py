"""Arguments and results are measured as the agent's client sends them."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any

import pytest
from google.adk.models.anthropic_llm import AnthropicLlm
from google.adk.models.base_llm import BaseLlm
from google.adk.models.gemma_llm import Gemma
from google.adk.models.google_llm import Gemini
from google.adk.models.lite_llm import LiteLlm

from contextguard_adk import Pipeline, Threshold
from contextguard_adk._measuring.tokens import (
    Memo,
    estimate_config_tokens,
    part_bytes,
    part_text,
)
from contextguard_adk._providers.clients import json_form
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as ask
from tests.builders import (
    DETACHED,
    call_part,
    queued_tool,
    response_part,
)
from tests.chats import HEURISTIC, KEY
from tests.guarded import guarded_chat

ROW = {"имя": "Анна", "n": None}


@cache
def client(name: str) -> BaseLlm:
    """A model class of ADK's."""
    if name == "litellm":
        return LiteLlm(model="openai/in-house")
    classes: dict[str, type[BaseLlm]]
    classes = {"gemini": Gemini, "claude": AnthropicLlm, "gemma": Gemma}
    return classes[name](model=f"{name}-3-in-house")


def compact(value: Any) -> str:
    """A value as JSON without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


spaced = partial(json.dumps, ensure_ascii=False)
BLOCKS = [{"type": "text", "text": "Да"}, {"type": "image"}, "more"]
RESULTS: dict[str, tuple[str, Any, str]] = {
    "gemini": ("gemini", [ROW], compact({"result": [ROW]})),
    "litellm": ("litellm", [ROW], spaced({"result": [ROW]})),
    "litellm-object": ("litellm", {"at": 1j, "имя": 2}, "{'at': 1j, 'имя': 2}"),
    "litellm-detached": ("litellm", {"at": DETACHED, "a": 2}, ""),
    "claude-wrapped": ("claude", [ROW], json.dumps([ROW])),
    "claude-text": ("claude", 'Say "да".', 'Say "да".'),
    "claude-nothing": ("claude", None, json.dumps({"result": None})),
    "claude-fields": ("claude", {"result": 1, **ROW}, json.dumps({"result": 1, **ROW})),
    "claude-blocks": ("claude", {"content": BLOCKS}, "Да\n{'type': 'image'}\nmore"),
    "gemma": ("gemma", [ROW], json.dumps({"result": [ROW]})),
}


@pytest.mark.parametrize(("name", "result", "sent"), RESULTS.values(), ids=RESULTS)
def test_result_is_measured_as_it_is_sent(name: str, result: Any, sent: str) -> None:
    """Each class of ADK's spells results in its own way; what none can has a size."""
    part, form = response_part("", result), json_form(client(name))
    if sent:
        assert part_text(part, form).decode() == sent
    assert part_bytes(part, form) == len(part_text(part, form)) > 10 * (not sent)


@pytest.mark.parametrize(
    ("name", "sent"),
    [("gemini", compact), ("litellm", spaced), ("claude", compact), ("gemma", compact)],
)
def test_arguments_are_measured_as_they_are_sent(name: str, sent: Any) -> None:
    """Only LiteLLM gets them as a text; others get values."""
    part = call_part("", rows=[ROW])
    assert part_text(part, json_form(client(name))).decode() == sent({"rows": [ROW]})


STOCK = [{"id": n, "имя": "Анна Петрова", "цена": n / 7} for n in range(150)]


@pytest.mark.parametrize(
    ("strategy", "rejections"),
    [
        (Threshold(context_window=20_000), 0),
        (Pipeline(context_window=20_000), 0),
        (Threshold(context_window=200_000), 1),
    ],
    ids=["threshold", "pipeline", "too-large-a-window"],
)
async def test_one_scale_for_all_of_a_call(strategy: Strategy, rejections: int) -> None:
    """What is stored beside the count is the size of what was sent, in one form, also
    after a compaction and after a rejection."""

    class AnthropicLlm(SimulatedLlm):
        """Measured as ADK's Claude class."""

    script: list[Reply] = [ask("list"), "Noted."] * 8
    llm = AnthropicLlm(context_window=20_000, script=script)
    chat = guarded_chat(llm, strategy, tools=[queued_tool("list", [STOCK])])
    for _ in range(8):
        await chat.say("List the stock.")
        sent, state = llm.requests[-1], await chat.state()
        expected = estimate_config_tokens(sent.config)
        expected += Memo(form=json_form(llm)).estimate_tokens(sent.contents)
        assert state[HEURISTIC] == pytest.approx(expected, abs=2)  # Rounded.
        assert state[KEY.format("real_tokens")] == sent.prompt_tokens
    sizes = [r.prompt_tokens for r in llm.requests if not r.is_summary]
    assert sizes != sorted(sizes)
    assert (llm.rejections, llm.violations) == (rejections, 0)
