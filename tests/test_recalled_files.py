"""Files that an agent reads back end no turn, whatever its client takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.base_llm import BaseLlm
from google.adk.models.google_llm import Gemini
from google.genai import types

from contextguard_adk import CompactTool, ContextGuardPlugin, Threshold
from contextguard_adk._history.fingerprints import handle_of
from tests.builders import Chat, answer_text, call, model, queued_tool, user
from tests.chats import DEMAND, seed, words
from tests.fake_claude import FakeClaude
from tests.fake_gemini import FakeGemini
from tests.fake_openai import FakeOpenAI
from tests.fake_provider import REFUSALS, FakeProvider, RefusalError
from tests.fake_responses import FakeResponses
from tests.files import KINDS, NOT_SHOWN, files_of, holds, in_result
from tests.players import Serve
from tests.playing import claude, lite

pytestmark = [
    pytest.mark.litellm,  # Its import takes seconds.
    # Those of the clients, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

Body = dict[str, Any]


class PickyGemini(FakeGemini):
    """Refuses what Gemini's documentation does not list."""

    def check(self, body: Body) -> None:
        """Looks at the files, too."""
        super().check(body)
        for part in (part for each in body["contents"] for part in each["parts"]):
            kind = part.get("inlineData", {}).get("mimeType", "image/png")
            if kind not in KINDS.values() or "fileData" in part:
                raise RefusalError(f"Unsupported MIME type: {kind}")


class PickyChat(FakeOpenAI):
    """Reads texts and images."""

    def check(self, body: Body) -> None:
        """Looks at the files, too."""
        super().check(body)
        for message in body["messages"]:
            content = message.get("content") or ()
            for block in content if isinstance(content, list) else ():
                image = block.get("image_url", {}).get("url", "")
                if block["type"] != "text" and not image.startswith("data:image/png;"):
                    raise RefusalError("Only texts and images are supported.")


@dataclass
class Way:
    """A client, the provider behind it, and which files of a tool it is sent again."""

    fake: FakeProvider
    llm: BaseLlm
    sent: set[str]


def open_gemini(serve: Serve) -> Way:
    """ADK's class for Gemini."""
    fake = PickyGemini()
    address = serve(fake)
    llm = Gemini(model="gemini-flash-latest", base_url=address)
    return Way(fake, llm, {"pdf", "png", "audio", "video"})


def open_claude(serve: Serve) -> Way:
    """ADK's class for Claude."""
    fake = FakeClaude(kind="enabled")
    serve(fake)
    return Way(fake, claude("claude-opus-4-7"), {"pdf", "png"})


def open_lite_claude(serve: Serve) -> Way:
    """Claude behind LiteLLM."""
    fake = FakeClaude(kind="enabled")
    address = serve(fake)
    return Way(fake, lite("anthropic/claude-opus-4-7", address), {"pdf", "png"})


def open_lite_openai(serve: Serve) -> Way:
    """A server of OpenAI's form behind LiteLLM."""
    fake = PickyChat()
    address = serve(fake)
    return Way(fake, lite("openai/in-house", address), {"png"})


def open_lite_mistral(serve: Serve) -> Way:
    """A provider that wants no message of the user behind a result."""
    fake = FakeOpenAI(kind="mistral")
    address = serve(fake)
    return Way(fake, lite("mistral/mistral-large-latest", address), set())


def open_responses(serve: Serve) -> Way:
    """ADK's class for OpenAI's Responses API."""
    openai = pytest.importorskip("google.adk.integrations.openai")
    fake = FakeResponses()
    llm = openai.OpenAIResponsesLlm(model="gpt-in-house", api_key="key")
    vars(llm)["_openai_client"] = fake.client
    return Way(fake, llm, {"pdf", "png"})


Open = Callable[[Serve], Way]
WAYS: dict[str, Open] = {
    "gemini": open_gemini,
    "claude": open_claude,
    "litellm claude": open_lite_claude,
    "litellm openai": open_lite_openai,
    "litellm mistral": open_lite_mistral,
    "responses": open_responses,
}


def open_chat(way: Way, result: Any = "x", *, is_guarded: bool = True) -> Chat:
    """A chat with an agent that has a tool, and can ask for a compaction."""
    guard = ContextGuardPlugin(default=Threshold(context_window=60_000))
    tools: list[Any] = [queued_tool("look", [result]), CompactTool()]
    agent = LlmAgent(name="agent", model=way.llm, tools=tools)
    return Chat(agent, [guard] if is_guarded else [])


async def tell_files(chat: Chat) -> dict[str, types.Part]:
    """Has the user send a file of each kind, and a tool return another one."""
    of_user = files_of("user")
    of_tool = files_of("tool")
    result = in_result("look", *of_tool.values())
    await seed(
        chat,
        user("Look at these."),
        types.Content(role="user", parts=[*of_user.values()]),
        model(words(3_000, "Seen.")),
        user("Look there, too."),
        call("look", "id-look"),
        types.Content(role="user", parts=[result]),
        model("Seen as well."),
        state=DEMAND,
    )
    named = {f"user {kind}": file for kind, file in of_user.items()}
    return named | {f"tool {kind}": file for kind, file in of_tool.items()}


def said_of(body: Body, handle: str) -> str:
    """What the tool has answered to the call for an item."""
    _, _, answer = json.dumps(body, ensure_ascii=False).partition(f"[{handle}: ")
    return answer[:400]


@pytest.mark.parametrize("name", WAYS)
async def test_a_file_that_is_read_back_is_sent_or_told(
    serve: Serve, name: str
) -> None:
    """As the user's, as a text or in words; later turns are answered as well."""
    way = WAYS[name](serve)
    chat = open_chat(way)
    files = await tell_files(chat)
    handles = {kind: handle_of(file) for kind, file in files.items()}
    recalls = [("recall_history", {"item": handle}) for handle in handles.values()]
    way.fake.script.extend([recalls, "Done.", "Fine."])

    assert answer_text(await chat.say("Read all of them again.")) == "Done."
    assert answer_text(await chat.say("And now?")) == "Fine."

    assert way.fake.refused == []
    for exchange in way.fake.of_agent[1:]:
        for kind, file in files.items():
            answer = said_of(exchange.body, handles[kind])
            name = kind.split()[1]
            if name in way.sent:
                assert "It is attached below." in answer, kind
            elif name in ("text", "csv", "json"):
                assert f"{name} of {kind.split()[0]}" in answer, kind
            else:
                assert NOT_SHOWN in answer, kind
            assert holds(exchange.body, file) == (name in way.sent), kind


FORMS = {
    "gemini": REFUSALS["gemini answer count"],
    "claude": REFUSALS["claude unanswered"].format(3, "toolu_1"),
    "responses": REFUSALS["openai orphan"],
}


@pytest.mark.parametrize("name", FORMS)
async def test_a_history_told_as_text_brings_no_files_that_are_refused(
    serve: Serve, name: str
) -> None:
    """What results hold is the user's then; the user's own stays the user's."""
    way = WAYS[name](serve)
    chat = open_chat(way)
    files = files_of("tool")
    result = in_result("look", *files.values())
    contents = [call("look", "id-look"), types.Content(role="user", parts=[result])]
    own = types.Content(role="user", parts=[files_of("user")["png"]])
    await seed(chat, user("Look."), own, *contents, model("Seen."))
    # Flattened is what was refused in every other form.
    way.fake.refuse_next(*[FORMS[name]] * 2)

    assert answer_text(await chat.say("Go on.")) == "Noted."
    assert answer_text(await chat.say("And now?")) == "Noted."

    body = way.fake.accepted[-1].body
    assert "The conversation so far, as text." in json.dumps(body)
    assert len(way.fake.refused) == 2
    assert holds(body, files_of("user")["png"])
    assert {kind for kind, file in files.items() if holds(body, file)} == way.sent
    assert all(f"{kind} of tool" in json.dumps(body) for kind in ("text", "csv"))
    assert json.dumps(body).count(NOT_SHOWN) == 5 - len(way.sent)


async def ends(way: Way, place: str, file: types.Part, *, is_guarded: bool) -> str:
    """How a turn ends in which a file is new and a compaction is asked for."""
    result = {"n": 1, "file": file} if place == "result" else "x"
    chat = open_chat(way, result, is_guarded=is_guarded)
    await seed(chat, user("Look."), model(words(3_000, "Seen.")), state=DEMAND)
    parts = [types.Part(text="Go on."), *([file] if place == "user" else [])]
    way.fake.script.clear()
    way.fake.script.extend([[("look", {})], [("compact_history", {})], "Done."])

    try:
        events = await chat.say(types.Content(role="user", parts=parts))
        error = next((e.error_message for e in events if e.error_message), "")
        return error or answer_text(events)
    except Exception as error:  # noqa: BLE001 - a client may raise anything.
        return type(error).__name__


@pytest.mark.parametrize("place", ["user", "result"])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.slow
async def test_no_compaction_ends_a_turn_for_a_file(
    serve: Serve, name: str, place: str
) -> None:
    """Where a client sends a file without the guard, it is answered with it as well."""
    way = WAYS[name](serve)
    answered = set[str]()
    for kind, file in files_of(place).items():
        if await ends(way, place, file, is_guarded=False) == "Done.":
            assert await ends(way, place, file, is_guarded=True) == "Done.", kind
            answered.add(kind)
    assert "png" in answered or name == "litellm mistral"
