"""Reading back what was compacted: the tool, its pages, and who is offered it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import google.adk
import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import DatabaseSessionService, InMemorySessionService
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.tools.function_tool import FunctionTool
from google.genai import types

from contextguard_adk import Strategy, Threshold
from contextguard_adk._measuring.calibration import token_counter
from contextguard_adk._recall.offer import may_offer
from contextguard_adk._recall.tool import RecallHistoryTool, find_matches
from contextguard_adk._summarizing.items import Item, list_items
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as tool_call
from tests.builders import Chat, answer_text, call, model, queued_tool, response, user
from tests.chats import agent_requests, count_tokens, guarded_chat

SECRET = "the deploy key of api-7 is key-551-gamma"


def rows(number: int, count: int = 120, secret: str = "") -> str:
    """A tool result with nothing special in it but one line, two thirds down."""
    lines = [f"row {number}-{i} host-{i * 7 % 97} ok" for i in range(count)]
    return "\n".join([*lines[: count * 2 // 3], secret, *lines[count * 2 // 3 :]])


class Source:
    """Reads from contents that were compacted altogether, where they can be read."""

    def __init__(self, contents: Sequence[types.Content] | None) -> None:
        self.contents = contents

    async def load(self) -> tuple[list[Item], list[Item]]:
        """All items, and the hidden ones; newest first."""
        if self.contents is None:
            raise OSError("down")
        items = list_items(self.contents, range(len(self.contents)))[::-1]
        return items, list({item.handle: item for item in items}.values())


def tool_over(
    contents: Sequence[types.Content],
    page_tokens: int = 400,
    window: int = 8_000,
    counter: Callable[[str], int] = count_tokens,
) -> RecallHistoryTool:
    """The tool over a history that was compacted altogether."""
    source: Any = Source(contents)
    return RecallHistoryTool(source, window, page_tokens, counter)


async def ask(tool: RecallHistoryTool, **args: Any) -> str:
    """What the tool answers."""
    answer = await tool.run_async(args=args, tool_context=None)  # type: ignore[arg-type]
    return answer["result"]


async def handle_in(tool: RecallHistoryTool, line: int = 1) -> str:
    """The handle of an item in the list."""
    return (await ask(tool)).splitlines()[line][2:12]


async def ask_on(
    tool: RecallHistoryTool, max_tokens: int, **args: Any
) -> AsyncIterator[str]:
    """All pages of an answer, each of at most so many tokens."""
    offset = 0
    while True:
        page = await ask(tool, **args, offset=offset)
        assert count_tokens(page) <= max_tokens
        yield page
        found = re.search(r"offset=(\d+)\)\]$", page)
        if not found:
            return
        assert int(found[1]) > offset
        offset = int(found[1])


# --- Pages ------------------------------------------------------------------------


async def test_an_item_is_read_page_by_page() -> None:
    """The pages, put together, are the item; each tells how to go on."""
    text = rows(9, 300, SECRET)
    tool = tool_over([call("read", path="a"), response("read", text)])
    pages = [page async for page in ask_on(tool, 400, item=await handle_in(tool))]
    assert len(pages) > 2
    assert "".join(p.split("\n", 1)[1].rsplit("\n", 1)[0] for p in pages) == text


@pytest.mark.parametrize("args", [{}, {"query": "lamp broken"}], ids=["list", "search"])
async def test_lists_and_searches_have_further_pages(args: dict[str, str]) -> None:
    """Every item is on one of them, and on one only."""
    contents = [user(f"note {n % 60}: the lamp {n % 60} is broken") for n in range(90)]
    tool = tool_over(contents, page_tokens=300)
    pages = [page async for page in ask_on(tool, 300, **args)]
    notes = re.findall(r'"note (\d+):', "".join(pages))
    assert sorted(map(int, notes)) == list(range(60))


async def test_a_history_that_cannot_be_read_is_said_so() -> None:
    """The tool never ends a turn."""
    source: Any = Source(None)
    tool = RecallHistoryTool(source, 8_000, 400, count_tokens)
    assert "cannot be read" in await ask(tool, query="x")


@pytest.mark.parametrize(
    ("filler", "correction"), [("7f3a 91,", 1.2), ("\N{FIRE}", 5.0), ("word ", 5.0)]
)
async def test_an_excerpt_holds_what_was_found(filler: str, correction: float) -> None:
    """However many tokens the text around it takes, in the page."""
    contents = [
        response("read", f"{filler * 500} {number} needle {filler * 500}")
        for number in range(3)
    ]
    counter = token_counter(correction)
    page = await ask(tool_over(contents, 2_000, 4_000, counter), query="needle")
    assert "needle" in page.splitlines()[2]
    assert counter(page) <= 400


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"item": ["a"]}, "no item"),
        ({"query": "zebra"}, "Nothing matches 'zebra'"),
        ({"query": "note", "offset": 99}, "2 matches; offset 99"),
        ({"query": "note", "offset": -3}, "2 items match"),
        ({"offset": 1e400}, "2 items, newest first"),
        ({"query": {"b": 7}}, "Nothing matches"),
    ],
)
async def test_bad_arguments_get_a_helpful_answer(
    args: dict[str, Any], expected: str
) -> None:
    """A model may ask for anything; nothing is raised."""
    tool = tool_over([user("a note"), model("another note")])
    assert expected in await ask(tool, **args)


# --- Searching --------------------------------------------------------------------

FAR = "token " + "x" * 500 + " the token of api-7 " + "y" * 500 + " api-7"


@pytest.mark.parametrize(
    ("query", "texts", "expected"),
    [
        ("deploy token", ["token to deploy", "x", "DEPLOY Token"], [(2, 0), (0, 0)]),
        ("red green", ["red", "red 2", "green, red"], [(2, 0), (0, 0), (1, 0)]),
        ("api-7 token", [FAR], [(0, FAR.index("token of"))]),
        (".*", ["lion"], []),
        ("部署 令牌", ["令牌是 7"], [(0, 0)]),
    ],
    ids=["phrase-first", "more-words-first", "together", "no-pattern", "any-script"],
)
def test_best_matches_come_first(
    query: str, texts: list[str], expected: list[tuple[int, int]]
) -> None:
    """Each item that matches is found once, with the place of its best match."""
    items = list_items([user(text) for text in texts], range(len(texts)))
    found = [(m.item.content_index, m.position) for m in find_matches(items, query)]
    assert found == expected


# --- Who is offered the tool ------------------------------------------------------


def request_with(*names: str, **config: Any) -> LlmRequest:
    """A request with function tools and further settings."""
    request = LlmRequest(config=types.GenerateContentConfig(**config))
    request.append_tools([FunctionTool(queued_tool(name, ["x"])) for name in names])
    return request


def choice(mode: str) -> LlmRequest:
    """A request with a tool choice."""
    calling = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode(mode))
    config = types.ToolConfig(function_calling_config=calling)
    return request_with("look", tool_config=config)


SEARCH = types.Tool(google_search=types.GoogleSearch())


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param(request_with("look"), True, id="functions"),
        pytest.param(LlmRequest(), False, id="no tools"),
        pytest.param(choice("AUTO"), True, id="free choice"),
        pytest.param(choice("ANY"), False, id="forced choice"),
        pytest.param(request_with("look", tools=[SEARCH]), False, id="built-in tool"),
        pytest.param(
            request_with("look", response_schema={"type": "STRING"}), False, id="schema"
        ),
    ],
)
def test_auto_offers_where_it_does_no_harm(
    request_: LlmRequest, expected: bool
) -> None:
    """Requests that some provider would refuse with a further tool get none; nor does
    one that has a tool of the same name, even where the setting says True."""
    agent = LlmAgent(name="agent", model="m")
    assert may_offer(request_, agent, "auto") is expected
    assert may_offer(request_, agent, True) is True
    assert may_offer(request_, agent, False) is False
    assert may_offer(request_with("recall_history"), agent, True) is False


# --- Through a real Runner --------------------------------------------------------


def recalled(llm: SimulatedLlm) -> list[dict[str, Any]]:
    """All that the recall tool has answered, as the model saw it, each once."""
    contents = [c for request in agent_requests(llm) for c in request.contents]
    found = [p.function_response for c in contents for p in c.parts or ()]
    answers = [r.response or {} for r in found if r and r.name == "recall_history"]
    return list({str(answer): answer for answer in answers}.values())


def offered(request: Any) -> list[str]:
    """The names of the tools in a request."""
    declared = [tool.function_declarations or () for tool in request.config.tools or ()]
    return [declaration.name for group in declared for declaration in group]


def recall_once(**args: Any) -> Callable[[LlmRequest], Reply]:
    """A script that recalls something, and then is done."""

    def script(request: LlmRequest) -> Reply:
        parts = [part for c in request.contents[-2:] for part in c.parts or ()]
        if any(part.function_response for part in parts):
            return "Done."
        return tool_call("recall_history", **args)

    return script


def open_chat(
    window: int = 4_000,
    results: Sequence[str] = ("x",),
    strategy: Strategy | None = None,
    **chat: Any,
) -> tuple[SimulatedLlm, Chat]:
    """A chat whose agent has one tool, with its model."""
    llm = SimulatedLlm(context_window=window, script=lambda request: "ok")
    llm.summary_replies = lambda request: "Nothing of note."
    tools = [queued_tool("look", results)] if results else []
    chosen = strategy or Threshold(context_window=window)
    return llm, guarded_chat(llm, chosen, agent={"tools": tools}, **chat)


@pytest.mark.parametrize(("window", "is_streaming"), [(4_000, False), (8_000, True)])
async def test_what_was_compacted_can_be_read_back(
    window: int, is_streaming: bool
) -> None:
    """The tool appears with the first compaction, not before; ADK executes it."""
    size = window // 40
    results = [rows(n, size, SECRET if n == 0 else "") for n in range(12)]
    strategy = Threshold(context_window=window, preview_tokens=None)
    llm, chat = open_chat(window, results, strategy, is_streaming=is_streaming)
    recall = tool_call("recall_history", query="deploy key api-7")
    looks: list[Reply] = [tool_call("look"), "Noted."]
    llm.script = [*looks * 12, recall]
    for turn in range(12):
        await chat.say(f"Look at number {turn}.")
    assert llm.summaries >= 2
    await chat.say("Which key was it?")
    assert "key-551-gamma" in recalled(llm)[0]["result"]
    requests = agent_requests(llm)
    had_tool = ["recall_history" in offered(request) for request in requests]
    assert had_tool == ["[Previous conv" in request.text for request in requests]
    assert {*had_tool} == {True, False}
    assert llm.rejections == llm.violations == 0


async def test_a_small_window_bears_page_after_page() -> None:
    """An agent that recalls all the time overflows nothing."""
    llm, chat = open_chat(results=[rows(n) for n in range(8)])
    recalls: list[Reply] = [
        [tool_call("recall_history", query=f"row {n}-1 host") for n in range(4)]
    ]
    looks: list[Reply] = [tool_call("look"), "Done."]
    llm.script = [*looks * 8, *recalls * 6, "Done."]
    for number in range(8):
        await chat.say(f"Look at {number}.")
    assert answer_text(await chat.say("Now read it all again.")) == "Done."
    pages = [page["result"] for page in recalled(llm)]
    assert len(pages) >= 4
    assert any("row 1-1 host" in page for page in pages)
    assert llm.rejections == llm.violations == 0
    # Copies are not kept as items of their own.
    assert "recall_history result" not in llm.requests[-1].text


NEWEST = RunConfig(get_session_config=GetSessionConfig(num_recent_events=14))
LOADS_THE_NEWEST = pytest.mark.skipif(
    google.adk.__version__.startswith("2.0."),
    reason="google-adk 2.0 loads all events where an agent is the root",
)


def media_names(request: Any) -> list[str]:
    """The images in a request."""
    parts = [part for content in request.contents for part in content.parts or ()]
    return [part.inline_data.display_name for part in parts if part.inline_data]


@pytest.mark.parametrize(
    ("data", "run_config", "is_shown"),
    [
        (b"\x89" * 3_000, None, True),
        (b"%PDF" * 300_000, None, False),
        pytest.param(b"\x89" * 3_000, NEWEST, False, marks=LOADS_THE_NEWEST),
    ],
    ids=["small", "large", "not loaded"],
)
async def test_a_file_comes_back_as_a_part(
    data: bytes, run_config: RunConfig | None, is_shown: bool
) -> None:
    """Older files are named with a handle and may be shown again; too large ones not:
    they would only push everything else out; nor those that a run does not load."""
    llm, chat = open_chat(8_000, run_config=run_config)
    kind = "application/pdf" if data.startswith(b"%PDF") else "image/png"
    blob = types.Blob(data=data, mime_type=kind, display_name="plan")
    parts = [types.Part(text="This is the plan."), types.Part(inline_data=blob)]
    await chat.say(types.Content(role="user", parts=parts))
    for _ in range(8):
        await chat.say("word " * 900)
    assert media_names(llm.requests[-1]) == []
    shown = next(record.text for record in llm.requests if record.is_summary)
    handle = re.findall(r"'plan', \d+ bytes; item (\w+)\]", shown)[0]
    llm.script = recall_once(item=handle)
    await chat.say("Show me the plan again.")
    assert media_names(llm.requests[-1]) == ["plan"] * is_shown
    assert recalled(llm)[0].get("attached") == (handle if is_shown else None)
    # It stays where it was put: what a provider has cached stays valid.
    before = llm.requests[-1].contents
    llm.script = lambda request: "Fine."
    await chat.say("And?")
    assert run_config or llm.requests[-1].contents[: len(before)] == before
    assert llm.rejections == llm.violations == 0


async def test_the_tool_is_there_again_after_a_restart(tmp_path: Any) -> None:
    """All it needs is the session; its handles stay the same."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    pages = []
    for turns in (6, 0):
        service = DatabaseSessionService(db_url=url)
        llm, chat = open_chat(session_service=service)
        for number in range(turns):
            await chat.say(f"{number} {SECRET} " + "word " * 500)
        llm.script = recall_once(query=f"3 {SECRET}")
        await chat.say("Read.")
        pages.append(recalled(llm)[-1]["result"].splitlines()[1])
        await chat.runner.close()
        await service.db_engine.dispose()
    assert pages[0] == pages[1]
    assert f'user message "3 {SECRET}' in pages[0]


async def test_nothing_speaks_of_the_tool_once_it_is_turned_off() -> None:
    """ADK ends the turn of an agent that calls a tool which it has not."""
    service = InMemorySessionService()
    for recall in (True, False):
        strategy = Threshold(context_window=4_000, recall=recall)
        llm, chat = open_chat(strategy=strategy, session_service=service)
        for number in range(6 if recall else 1):
            await chat.say(f"{number} {SECRET} " + "word " * 500)
        assert ("recall_history" in llm.requests[-1].text) is recall
        assert ("recall_history" in offered(llm.requests[-1])) is recall
        assert "[Previous conversation summary]" in llm.requests[-1].text
