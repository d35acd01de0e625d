"""Arguments and results are measured as the agent's client sends them."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any

import pytest
from google.adk.models.base_llm import BaseLlm
from google.adk.models.gemma_llm import Gemma
from google.adk.models.google_llm import Gemini

from contextguard_adk._measuring.tokens import (
    Memo,
    part_text,
)
from contextguard_adk._providers.clients import json_form
from tests.builders import DETACHED, call_part, response_part

# Those of two clients whose import takes seconds: one process makes them.
pytestmark = pytest.mark.litellm

ROW = {"имя": "Анна", "n": None}


@cache
def client(name: str) -> BaseLlm:
    """A model class of ADK's."""
    if name == "litellm":
        from google.adk.models.lite_llm import LiteLlm

        return LiteLlm(model="openai/in-house")
    if name == "claude":
        from google.adk.models.anthropic_llm import AnthropicLlm

        return AnthropicLlm(model="claude-3-in-house")
    classes: dict[str, type[BaseLlm]] = {"gemini": Gemini, "gemma": Gemma}
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
    part = response_part("", result)
    form = json_form(client(name))
    if sent:
        assert part_text(part, form).decode() == sent
    assert (
        Memo(form=form).part_bytes(part) == len(part_text(part, form)) > 10 * (not sent)
    )


@pytest.mark.parametrize(
    ("name", "sent"),
    [("gemini", compact), ("litellm", spaced), ("claude", compact), ("gemma", compact)],
)
def test_arguments_are_measured_as_they_are_sent(name: str, sent: Any) -> None:
    """Only LiteLLM gets them as a text; others get values."""
    part = call_part("", rows=[ROW])
    assert part_text(part, json_form(client(name))).decode() == sent({"rows": [ROW]})
