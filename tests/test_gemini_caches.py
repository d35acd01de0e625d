"""Requests of which Gemini has cached a part, and calls without their signatures."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.context_cache_config import ContextCacheConfig
from google.adk.models.google_llm import Gemini
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold
from tests import fake_gemini
from tests.builders import SUMMARY_BEGIN, Chat, call, queued_tool, response, user
from tests.chats import Changing, hide
from tests.fake_gemini import FakeGemini
from tests.playing import TOOLS, Player, check_played, play_gemini

pytestmark = [
    # Those of the client, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

Serve = Callable[..., str]

HALL = "hall 4711"
INSTRUCTION = f"You count the shelves of {HALL}. " * 300
SECRET = "xyzzy-4711"
TOO_LONG = FakeGemini().overflow_words(9_000, 6_000)
each_refusal = pytest.mark.parametrize(
    "words", [TOO_LONG, fake_gemini.MOVED_SIGNATURE], ids=["too long", "moved"]
)


def play_cached(fake: FakeGemini, serve: Serve, **agent: Any) -> Player:
    """A player of an app that has ADK cache the beginning of its requests."""
    cache = ContextCacheConfig(min_tokens=0, cache_intervals=100)
    app = {"context_cache_config": cache}
    agent = {"instruction": INSTRUCTION, **agent}
    strategy = Threshold(context_window=30_000)
    return play_gemini(fake, serve(fake), app=app, agent=agent, strategy=strategy)


async def play_refusal(player: Player, words: str) -> None:
    """Plays four turns; the first request of the last one is refused."""
    for number in range(3):
        await player.say(player.steps(2), f"Request {number}, {SECRET}: count on.")
    player.fake.refuse_next(words)
    await player.say(player.steps(2), "Request 3, for you: count on.")


def declared(body: dict[str, Any]) -> set[str]:
    """The functions that a request, or a cache, declares."""
    tools = body.get("tools") or ()
    return {
        each["name"] for tool in tools for each in tool.get("functionDeclarations", ())
    }


@each_refusal
async def test_a_request_that_is_cached_in_part_is_sent_again_whole(
    serve: Serve, words: str
) -> None:
    """With its instruction, its tools and all contents, and without the cache."""
    fake = FakeGemini()
    player = play_cached(fake, serve)
    await play_refusal(player, words)
    check_played(player, compactions=int(words == TOO_LONG), refusals=1)

    refused = next(each for each in fake.of_agent if each.refused)
    again = fake.of_agent[fake.of_agent.index(refused) + 1].body
    cache = fake.caches[refused.body["cachedContent"]]
    assert "cachedContent" not in again
    assert again["systemInstruction"] == cache["systemInstruction"]
    names = {each.__name__ for each in TOOLS} | {"recall_history"}
    assert declared(again) == declared(cache) == names

    before = fake.contents_of(refused.body)
    if words == TOO_LONG:
        text = json.dumps(again["contents"])
        assert SUMMARY_BEGIN in text
        assert "Request 3, for you: count on." in text
        assert len(text) < len(json.dumps(before))
    else:
        assert again["contents"] == before


def check_masked(fake: FakeGemini, *secrets: str) -> None:
    """Sees to it that a request with a cache was refused, and nothing was told."""
    refused = [each for each in fake.of_agent if each.refused]
    assert "cachedContent" in refused[0].body
    sent = json.dumps([*fake.caches.values(), *[e.body for e in fake.exchanges]])
    assert not any(secret in sent for secret in (SECRET, *secrets))


@each_refusal
async def test_what_a_callback_masks_is_masked_in_what_is_sent_again(
    serve: Serve, words: str
) -> None:
    """Also where a cache held it: the guard does not send it from the session."""
    fake = FakeGemini()

    def mask(callback_context: CallbackContext, llm_request: LlmRequest) -> None:
        shown = llm_request.contents
        hide(SECRET, llm_request)
        pairs = zip(shown, llm_request.contents, strict=True)
        llm_request.contents = [a if a == b else b for a, b in pairs]
        llm_request.config.system_instruction = "You count the shelves. " * 400

    await play_refusal(play_cached(fake, serve, before_model_callback=mask), words)
    check_masked(fake, HALL)


async def test_what_a_plugin_has_masked_is_not_sent_again(serve: Serve) -> None:
    """One behind the guard that puts copies of all contents into the request."""
    fake = FakeGemini()
    player = play_cached(fake, serve)
    player.after = lambda: [Changing(lambda request: hide(SECRET, request))]
    await play_refusal(player, fake_gemini.MOVED_SIGNATURE)
    check_masked(fake)


async def test_a_cache_that_the_app_has_made_leaves_no_room_for_tools(
    serve: Serve,
) -> None:
    """Gemini takes none beside it, also where recall is asked for."""
    fake = FakeGemini()
    address = serve(fake)
    name = "cachedContents/1"
    fake.caches[name] = {"model": "gemini-pro-latest", "contents": []}
    config = types.GenerateContentConfig(cached_content=name)

    def leave_to_cache(
        callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        llm_request.config.system_instruction = None  # ADK's own, with the name.

    agent = {
        "tools": [],
        "before_model_callback": leave_to_cache,
        "generate_content_config": config,
    }
    strategy = Threshold(context_window=6_000, recall=True)
    player = play_gemini(fake, address, agent=agent, strategy=strategy)
    for number in range(8):
        await player.say(text=f"Request {number}: " + "count the crates, " * 250)
    check_played(player)
    assert all(each.body["cachedContent"] == name for each in fake.of_agent)
    assert not any(declared(each.body) for each in fake.of_agent)


async def test_a_call_without_a_signature_is_sent_again_with_a_dummy(
    serve: Serve,
) -> None:
    """As a call, not told as text."""
    fake = FakeGemini()
    player = play_gemini(fake, serve(fake), strategy=Threshold(context_window=30_000))
    words = fake_gemini.NO_SIGNATURE.format("look_up", 2)
    fake.refuse_next(words, after=2)
    await player.say(player.steps(4))
    check_played(player, compactions=0, refusals=1)
    refused, again = fake.of_agent[2:4]
    parts = [part for each in again.body["contents"] for part in each["parts"]]
    signed = [part["thoughtSignature"] for part in parts if "functionCall" in part]
    assert refused.refused

    dummy = base64.b64encode(b"skip_thought_signature_validator").decode()
    assert signed == [dummy] * 2


@pytest.mark.parametrize(
    ("model", "is_signed"),
    [
        ("gemini-3-pro-preview", True),
        ("gemini-flash-latest", True),
        ("gemini-flash-lite-latest", True),
        ("gemini-pro-latest", True),
        ("gemini-2.5-flash-001", False),
    ],
)
async def test_models_from_gemini_3_on_get_signed_calls(
    serve: Serve, model: str, is_signed: bool
) -> None:
    """So do the names that mean the newest model; another model made the call."""
    fake = FakeGemini()
    llm = Gemini(model=model, base_url=serve(fake))
    agent = LlmAgent(name="agent", model=llm, tools=[queued_tool("look_up", ["x"])])
    chat = Chat(agent, [ContextGuardPlugin()])
    await chat.tell([user("Look it up."), call("look_up", "c1")])
    await chat.say(response("look_up", "x", "c1"))

    sent = fake.of_agent[0].body["contents"]
    parts = [part for each in sent for part in each["parts"] if "functionCall" in part]
    assert ["thoughtSignature" in part for part in parts] == [is_signed]
