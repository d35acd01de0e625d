"""What comes back of a provider's own compaction and editing through ADK's classes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.base_llm import BaseLlm
from google.genai import types

from contextguard_adk import ContextGuardPlugin
from contextguard_adk._providers.native_compaction import loses_compaction
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, answer_text
from tests.fake_claude import FakeClaude
from tests.fake_responses import FakeResponses
from tests.playing import lite

pytestmark = [
    pytest.mark.litellm,  # Its import takes seconds.
    # Those of the clients, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Serve = Callable[..., str]
CLAUDE = "claude-opus-5-5"
COMPACT = {"edits": [{"type": "compact_20260112"}]}
CLEAR = {"edits": [{"type": "clear_tool_uses_20250919"}]}
COMPACTION = [{"type": "compaction", "compact_threshold": 150_000}]
LOST = "nothing: each call compacts anew"
FATAL = "nothing, and without the guard the next turn fails"
WORKS = "nothing has to"


def lite_claude(address: str, **settings: Any) -> BaseLlm:
    """Claude behind LiteLLM."""
    return lite(f"anthropic/{CLAUDE}", address, **settings)


def lite_responses(address: str, **settings: Any) -> BaseLlm:
    """OpenAI's Responses API behind LiteLLM."""
    return lite("openai/responses/in-house", address, **settings)


def own_claude(management: dict[str, Any]) -> BaseLlm:
    """A class as users write it: ADK's own has no such option."""
    from google.adk.models.anthropic_llm import AnthropicLlm

    if not hasattr(AnthropicLlm, "_build_anthropic_kwargs"):
        pytest.skip("this ADK has no method that such a class can override")

    class EditingClaude(AnthropicLlm):
        def _build_anthropic_kwargs(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            made = super()._build_anthropic_kwargs(*args, **kwargs)
            return {**made, "extra_body": {"context_management": management}}

    return EditingClaude(model=CLAUDE)


def adk_responses(fake: FakeResponses, **settings: Any) -> BaseLlm:
    """ADK's class for OpenAI's Responses API."""
    openai = pytest.importorskip("google.adk.integrations.openai")
    llm: BaseLlm = openai.OpenAIResponsesLlm(
        model="in-house", api_key="key", **settings
    )
    vars(llm)["_openai_client"] = fake.client
    return llm


class Row(NamedTuple):
    """A row of the table in docs/providers.md, and how its model is made."""

    name: str
    option: str
    comes_back: str
    fake: type[FakeClaude] | type[FakeResponses]
    make: Callable[[str, Any], BaseLlm]


ROWS = [
    Row(
        "`LiteLlm`, `anthropic/…`",
        "`context_management`, `compact_20260112`",
        LOST,
        FakeClaude,
        lambda address, _: lite_claude(address, context_management=COMPACT),
    ),
    Row(
        "`LiteLlm`, `anthropic/…`",
        "`context_management`, `clear_tool_uses_20250919`",
        WORKS,
        FakeClaude,
        lambda address, _: lite_claude(address, context_management=CLEAR),
    ),
    Row(
        "`LiteLlm`, `openai/responses/…`",
        "`extra_body` with `context_management`, `compaction`",
        LOST,
        FakeResponses,
        lambda address, _: lite_responses(
            address, extra_body={"context_management": COMPACTION}
        ),
    ),
    Row(
        "`LiteLlm`, `openai/responses/…`",
        '`truncation="auto"`',
        WORKS,
        FakeResponses,
        lambda address, _: lite_responses(address, truncation="auto"),
    ),
    Row(
        "`OpenAIResponsesLlm`",
        "`extra_request_args` with `context_management`, `compaction`",
        LOST,
        FakeResponses,
        lambda _, fake: adk_responses(
            fake, extra_request_args={"context_management": COMPACTION}
        ),
    ),
    Row(
        "`OpenAIResponsesLlm`",
        '`truncation="auto"`',
        WORKS,
        FakeResponses,
        lambda _, fake: adk_responses(fake, truncation="auto"),
    ),
    Row(
        "`AnthropicLlm`, a class of your own",
        "`context_management`, `compact_20260112`",
        FATAL,
        FakeClaude,
        lambda *_: own_claude(COMPACT),
    ),
    Row(
        "`AnthropicLlm`, a class of your own",
        "`context_management`, `clear_tool_uses_20250919`",
        WORKS,
        FakeClaude,
        lambda *_: own_claude(CLEAR),
    ),
]
IDS = [re.sub(r"[^\w ]", "", f"{row.name} {row.option}") for row in ROWS]


async def play(chat: Chat, turns: int = 3) -> int:
    """Says something in some turns; returns how many got an answer."""
    answered = 0
    for number in range(turns):
        try:
            answered += "Noted." in answer_text(await chat.say(f"Request {number}"))
        except NotImplementedError:  # ADK's Claude class knows no empty part.
            continue
    return answered


@pytest.mark.parametrize("row", ROWS, ids=IDS)
async def test_a_compaction_is_lost_and_the_guard_says_so(
    serve: Serve, caplog: pytest.LogCaptureFixture, row: Row
) -> None:
    """Once, and not of what works; each turn gets its answer."""
    fake = row.fake()
    address = serve(fake)
    agent = LlmAgent(name="writer", model=row.make(address, fake))
    answered = await play(Chat(agent, [ContextGuardPlugin()]))

    is_lost = row.comes_back != WORKS
    assert answered == len(fake.accepted) == 3
    assert fake.compactions == (3 if is_lost else 0)
    told = [text for text in caplog.messages if "each call compacts anew" in text]
    assert len(told) == is_lost
    assert all(text.startswith("Agent 'writer': ") for text in told)
    for exchange in fake.of_agent:
        assert {"context_management", "truncation"} & exchange.body.keys()


@pytest.mark.parametrize("row", ROWS, ids=IDS)
async def test_without_the_guard_only_one_class_fails(serve: Serve, row: Row) -> None:
    """The history of ADK's Claude class has a part that it cannot send."""
    fake = row.fake()
    address = serve(fake)
    agent = LlmAgent(name="writer", model=row.make(address, fake))
    answered = await play(Chat(agent))
    assert answered == (1 if row.comes_back == FATAL else 3)


def test_the_documented_table_has_these_rows() -> None:
    """In this order, with what comes back."""
    page = Path(__file__).parents[1] / "docs" / "providers.md"
    _, _, section = page.read_text("utf-8").partition("| class | option |")
    documented = re.findall(r"(?m)^\| (.*) \|$", section.partition("\n\n")[0])
    assert documented == [" | ".join(row[:3]) for row in ROWS]


async def test_an_agent_that_is_not_guarded_is_warned_too(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """Leaving compaction to the provider is no way out; so are other agents not."""
    address = serve(FakeClaude())
    model = lite_claude(address, context_management=COMPACT)
    agent = LlmAgent(name="writer", model=model)
    await play(Chat(agent, [ContextGuardPlugin(agents={"writer": None})]), turns=1)
    plain = LlmAgent(name="plain", model=SimulatedLlm())
    await Chat(plain, [ContextGuardPlugin()]).say("Request")

    told = [text for text in caplog.messages if "compacts anew" in text]
    assert [text.partition(":")[0] for text in told] == ["Agent 'writer'"]


LISTED = {"context_management": COMPACTION}


@pytest.mark.parametrize(
    ("settings", "is_lost"),
    [
        (LISTED, True),
        ({"context_management": {"edits": [*CLEAR["edits"], *COMPACT["edits"]]}}, True),
        ({"fallbacks": ["other/model", {"model": "other/model", **LISTED}]}, True),
        ({"context_management": CLEAR, "extra_body": {"user": "u"}}, False),
        ({"context_management": {"edits": "compact"}, "fallbacks": "no list"}, False),
        ({"context_management": [None, {"type": None}], "extra_body": None}, False),
        ({"extra_headers": {"anthropic-beta": "compact-2026-01-12"}}, False),
        ({}, False),
    ],
)
def test_settings_of_litellm_that_compact(
    settings: dict[str, Any], is_lost: bool
) -> None:
    """A header alone has nothing compacted; odd values are no error."""
    llm = lite(f"anthropic/{CLAUDE}", "http://localhost", **settings)
    assert loses_compaction(llm, None) is is_lost


def test_the_config_of_an_agent_may_ask_for_a_compaction() -> None:
    """By an `extra_body`, which LiteLLM sends on."""
    options = types.HttpOptions(extra_body=LISTED)
    config = types.GenerateContentConfig(http_options=options)
    assert loses_compaction("gemini-flash-latest", config)
    assert not loses_compaction("gemini-flash-latest", types.GenerateContentConfig())


def test_each_model_of_a_fallback_counts() -> None:
    """Whichever is asked first."""
    models = pytest.importorskip("google.adk.models")
    if not hasattr(models, "FallbackModel"):
        pytest.skip("this ADK has no FallbackModel")
    compacting = lite("openai/in-house", "http://localhost", extra_body=LISTED)
    fallback = models.FallbackModel(models=[SimulatedLlm(), compacting])
    assert loses_compaction(fallback, None)
    assert loses_compaction(models.FallbackModel(models=[fallback]), None)
    assert not loses_compaction(models.FallbackModel(models=[SimulatedLlm()]), None)
