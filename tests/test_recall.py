"""Reading back what was compacted: the tool, its pages, and who is offered it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import DatabaseSessionService, InMemorySessionService
from google.adk.tools.function_tool import FunctionTool
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.measuring.calibration import token_counter
from contextguard_adk.recall.offer import attach_files, may_offer
from contextguard_adk.recall.tool import RecallHistoryTool, RecallSource
from contextguard_adk.summarizing.items import list_items
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as tool_call
from tests.builders import (
    Chat,
    answer_text,
    call,
    guarded_agent,
    model,
    queued_tool,
    response,
    user,
)

SECRET = "the deploy key of api-7 is key-551-gamma"


def rows(number: int, count: int = 120) -> str:
    """A tool result with nothing special in it."""
    return "\n".join(f"row {number}-{i} host-{i * 7 % 97} ok" for i in range(count))


def hidden_fact(position: float = 0.5, count: int = 300) -> str:
    """A long result with one line that matters."""
    lines = rows(9, count).splitlines()
    lines.insert(int(position * len(lines)), SECRET)
    return "\n".join(lines)


def count_tokens(text: str) -> int:
    """One token for four characters."""
    return len(text) // 4


def tool_over(
    contents: Sequence[types.Content],
    page_tokens: int = 400,
    window: int = 8_000,
    counter: Callable[[str], int] = count_tokens,
) -> RecallHistoryTool:
    """The tool over a history that was compacted altogether."""
    indexes = range(len(contents))
    source = RecallSource(list_items(contents, indexes), frozenset(indexes))

    async def load() -> RecallSource:
        return source

    return RecallHistoryTool(load, window, page_tokens, lambda: counter)


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


def recalled(llm: SimulatedLlm) -> list[dict[str, Any]]:
    """All that the recall tool has answered, as the model saw it."""
    parts = [
        part
        for request in llm.requests
        if not request.is_summary
        for content in request.contents
        for part in content.parts or ()
    ]
    found = [part.function_response for part in parts if part.function_response]
    answers = [item.response or {} for item in found if item.name == "recall_history"]
    return list({str(answer): answer for answer in answers}.values())


def offered(request: Any) -> list[str]:
    """The names of the tools in a request."""
    return [
        declaration.name
        for tool in request.config.tools or ()
        for declaration in tool.function_declarations or ()
    ]


# --- Pages ------------------------------------------------------------------------


async def test_an_item_is_read_page_by_page() -> None:
    """The pages, put together, are the item; each tells how to go on."""
    text = hidden_fact()
    tool = tool_over([call("read", path="a"), response("read", text)])
    pages = [page async for page in ask_on(tool, 400, item=await handle_in(tool))]
    assert len(pages) > 2
    assert "".join(p.split("\n", 1)[1].rsplit("\n", 1)[0] for p in pages) == text


async def test_a_search_shows_the_place() -> None:
    """With where the excerpt begins, so that reading can go on from there."""
    text = hidden_fact(0.8)
    tool = tool_over([user("Look."), call("read"), response("read", text)])
    page = await ask(tool, query="deploy key api-7")
    assert SECRET in page
    start = int(re.findall(r"from (\d+)", page)[0])
    assert 0 <= text.index(SECRET) - start < 1_000


@pytest.mark.parametrize("window", [4_000, 200_000])
@pytest.mark.parametrize("correction", [1.2, 5.0])
@pytest.mark.parametrize("filler", ["7f3a 91,", "\N{FIRE}", "word "])
async def test_an_excerpt_holds_what_was_found(
    filler: str, correction: float, window: int
) -> None:
    """However many tokens the text around it takes, and within the page."""
    contents = [
        response("read", f"{filler * 500} {number} needle {filler * 500}")
        for number in range(3)
    ]
    counter = token_counter(correction)
    page = await ask(tool_over(contents, 2_000, window, counter), query="needle")
    assert "needle" in page.splitlines()[2]
    assert counter(page) <= min(2_000, window // 10)


@pytest.mark.parametrize("correction", [1.2, 5.0])
async def test_long_names_and_queries_do_not_fill_a_page(correction: float) -> None:
    """Some addresses of files hold pages, and a query is not repeated whole."""
    address = types.FileData(file_uri="https://host/" + "9f," * 9_000 + "map.png")
    contents = [
        types.Content(role="user", parts=[types.Part(file_data=address)]),
        response("read", "\u6f22" * 9_000),
    ]
    counter = token_counter(correction)
    tool = tool_over(contents, 2_000, 4_000, counter)
    page = await ask(tool)
    assert "map.png" in page
    assert "read result" in page
    for query in ("\u6f22" * 200, "map.png", "\N{FIRE}" * 200):
        assert counter(await ask(tool, query=query)) <= 400


@pytest.mark.parametrize("args", [{}, {"query": "lamp broken"}], ids=["list", "search"])
async def test_lists_and_searches_have_further_pages(args: dict[str, str]) -> None:
    """Every item is on one of them, and on one only."""
    contents = [user(f"note {n % 60}: the lamp {n % 60} is broken") for n in range(90)]
    tool = tool_over(contents, page_tokens=300)
    pages = [page async for page in ask_on(tool, 300, **args)]
    notes = re.findall(r'"note (\d+):', "".join(pages))
    assert sorted(map(int, notes)) == list(range(60))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"item": "ffffffffff"}, "no item 'ffffffffff'"),
        ({"item": ["a"]}, "no item"),
        ({"query": "  "}, "2 items, newest first"),
        ({"query": "zebra"}, "Nothing matches 'zebra'"),
        ({"query": "note", "offset": 99}, "2 matches; offset 99"),
        ({"query": "note", "offset": -3}, "2 items match"),
        ({"offset": 99}, "2 items; offset 99"),
        ({"offset": "many"}, "2 items, newest first"),
        ({"offset": 1e400}, "2 items, newest first"),
        ({"query": None, "item": None, "offset": None}, "2 items, newest first"),
        ({"query": "note" * 500}, "Nothing matches"),
        ({"query": {"b": 7}}, "Nothing matches"),
    ],
)
async def test_bad_arguments_get_a_helpful_answer(
    args: dict[str, Any], expected: str
) -> None:
    """A model may ask for anything; nothing is raised."""
    tool = tool_over([user("a note"), model("another note")])
    assert expected in await ask(tool, **args)


async def test_an_offset_behind_the_end_is_told_the_range() -> None:
    """So that the next call is right."""
    tool = tool_over([user("a note " * 100)])
    handle = await handle_in(tool)
    assert "offsets 0 to 699" in await ask(tool, item=handle, offset=700)
    assert "a note" in await ask(tool, item=f"[{handle}]", offset=690)


@pytest.mark.parametrize("window", [1_000, 200_000])
async def test_a_page_is_at_most_a_tenth_of_the_window(window: int) -> None:
    """Whatever the setting, and however dense the text."""
    tool = tool_over([response("read", "x" * 90_000)], 50_000, window)
    for args in ({}, {"item": await handle_in(tool)}, {"query": "xxx"}):
        assert count_tokens(await ask(tool, **args)) <= window // 10


async def test_pages_can_be_sent_whatever_the_history_holds() -> None:
    """A lone surrogate in one would end the turn in the model's client."""
    tool = tool_over([user("half \ud83d of a pair " * 30), user("whole")])
    handle = await handle_in(tool, 2)
    for args in ({}, {"item": handle}, {"query": "half"}, {"query": "\ud83d"}):
        assert (await ask(tool, **args)).encode()


async def test_a_history_that_cannot_be_read_is_said_so() -> None:
    """The tool never ends a turn."""

    async def load() -> RecallSource:
        raise OSError("down")

    tool = RecallHistoryTool(load, 8_000, 400, lambda: count_tokens)
    assert "cannot be read" in await ask(tool, query="x")


# --- Who is offered the tool ------------------------------------------------------


def request_with(**config: Any) -> LlmRequest:
    """A request with one function tool and further settings."""
    request = LlmRequest(config=types.GenerateContentConfig(**config))
    request.append_tools([FunctionTool(queued_tool("look", ["x"]))])
    return request


def choice(mode: str) -> LlmRequest:
    """A request with a tool choice."""
    calling = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode(mode))
    return request_with(tool_config=types.ToolConfig(function_calling_config=calling))


def built_in(**tool: Any) -> LlmRequest:
    """A request with a tool that the provider runs."""
    return request_with(tools=[types.Tool(**tool)])


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param(request_with(), True, id="functions"),
        pytest.param(LlmRequest(), False, id="no tools"),
        pytest.param(choice("AUTO"), True, id="free choice"),
        pytest.param(choice("ANY"), False, id="forced choice"),
        pytest.param(choice("NONE"), False, id="tools forbidden"),
        pytest.param(
            built_in(google_search=types.GoogleSearch()), False, id="built-in tool"
        ),
        pytest.param(
            request_with(response_schema={"type": "STRING"}), False, id="schema"
        ),
        pytest.param(
            request_with(response_json_schema={"type": "string"}),
            False,
            id="JSON schema",
        ),
    ],
)
def test_auto_offers_where_it_does_no_harm(
    request_: LlmRequest, expected: bool
) -> None:
    """Requests that some provider would refuse with a further tool get none."""
    agent = LlmAgent(name="agent", model="m")
    assert may_offer(request_, agent, "auto") is expected
    assert may_offer(request_, agent, True) is True
    assert may_offer(request_, agent, False) is False


def test_an_output_schema_or_the_same_name_stand_against_it() -> None:
    """The name even where the setting says True."""
    agent = LlmAgent(name="agent", model="m")
    schema = LlmAgent(name="agent", model="m", output_schema=types.Part)
    assert may_offer(request_with(), schema, "auto") is False
    taken = request_with()
    taken.append_tools([FunctionTool(queued_tool("recall_history", ["x"]))])
    assert may_offer(taken, agent, "auto") is False
    assert may_offer(taken, agent, True) is False


# --- Through a real Runner --------------------------------------------------------


def newest_results(request: LlmRequest) -> list[types.FunctionResponse]:
    """The tool results that the newest contents hold."""
    parts = [part for c in request.contents[-2:] for part in c.parts or ()]
    return [part.function_response for part in parts if part.function_response]


def recall_once(**args: Any) -> Callable[[LlmRequest], Reply]:
    """A script that recalls something, and then is done."""

    def script(request: LlmRequest) -> Reply:
        if any(found.name == "recall_history" for found in newest_results(request)):
            return "Done."
        return tool_call("recall_history", **args)

    return script


def look_then_recall(request: LlmRequest) -> Reply:
    """A script that looks things up, and recalls the key when it is asked for it."""
    last = request.contents[-1]
    results = [p.function_response for p in last.parts or () if p.function_response]
    if results and results[0].name == "recall_history":
        keys = re.findall(r"key-\d+-\w+", str(results[0].response))
        return f"It is {keys[0]}." if keys else "I cannot find it."
    if results:
        return "Noted."
    if "Which key" in "".join(part.text or "" for part in last.parts or ()):
        return tool_call("recall_history", query="deploy key api-7")
    return tool_call("look")


@pytest.mark.parametrize(("window", "is_streaming"), [(4_000, False), (8_000, True)])
async def test_what_was_compacted_can_be_read_back(
    window: int, is_streaming: bool
) -> None:
    """The tool appears with the first compaction, not before; ADK executes it."""
    llm = SimulatedLlm(
        context_window=window,
        script=look_then_recall,
        summary_replies=lambda request: "Rows were looked at.",
    )
    size = window // 40
    results = [hidden_fact(0.5, size), *(rows(n, size) for n in range(11))]
    agent = guarded_agent(llm, [queued_tool("look", results)])
    guard = ContextGuardPlugin(default=Threshold(context_window=window))
    chat = Chat(agent, [guard], is_streaming=is_streaming)
    for turn in range(12):
        await chat.say(f"Look at number {turn}.")
    assert llm.summaries >= 2
    answer = answer_text(await chat.say("Which key was it?"))
    assert answer == "It is key-551-gamma."
    agent_requests = [request for request in llm.requests if not request.is_summary]
    had_tool = ["recall_history" in offered(request) for request in agent_requests]
    was_compacted = ["[Previous conv" in request.text for request in agent_requests]
    assert had_tool == was_compacted
    assert True in had_tool
    assert False in had_tool
    assert llm.rejections == llm.violations == 0


@pytest.mark.parametrize("recall", [False, "auto"])
async def test_agents_without_tools_are_left_alone(recall: Any) -> None:
    """Neither a tool, nor handles that lead nowhere."""
    llm = SimulatedLlm(context_window=4_000, script=lambda request: "ok")
    tools = [queued_tool("look", ["x"])] if recall is False else []
    guard = ContextGuardPlugin(default=Threshold(context_window=4_000, recall=recall))
    chat = Chat(guarded_agent(llm, tools), [guard])
    for _ in range(8):
        await chat.say("word " * 500)
    assert llm.summaries
    assert all("recall_history" not in offered(request) for request in llm.requests)
    assert "recall_history" not in llm.requests[-1].text


async def test_a_small_window_bears_page_after_page() -> None:
    """An agent that recalls all the time overflows nothing."""
    recalls: list[Reply] = [
        [tool_call("recall_history", query=f"row {n}-1 host") for n in range(4)]
        for _ in range(6)
    ]
    looks: list[Reply] = [tool_call("look"), "Done."] * 8
    llm = SimulatedLlm(context_window=4_000, script=[*looks, *recalls, "Done."])
    agent = guarded_agent(llm, [queued_tool("look", [rows(n) for n in range(8)])])
    chat = Chat(agent, [ContextGuardPlugin(default=Threshold(context_window=4_000))])
    for number in range(8):
        await chat.say(f"Look at {number}.")
    assert answer_text(await chat.say("Now read it all again.")) == "Done."
    pages = [page["result"] for page in recalled(llm)]
    assert len(pages) >= 4
    assert any("row 1-1 host" in page for page in pages)
    assert llm.rejections == llm.violations == 0
    # Copies are not kept as items of their own.
    assert "recall_history result" not in llm.requests[-1].text


async def test_a_long_live_request_is_clipped_with_a_handle() -> None:
    """Up to 30 % of the window it stays word for word; beyond, it can be read."""
    window = 4_000
    secret = "the gate opens to marzipan"  # No name: the ledger does not keep it.
    whole = f"Begin. {'word ' * 1_300} {secret}. {'word ' * 1_300} End."
    llm = SimulatedLlm(
        context_window=window,
        script=lambda request: "Done.",
        summary_replies=lambda request: "Nothing of note.",
    )
    agent = guarded_agent(llm, [queued_tool("look", ["x"])])
    chat = Chat(agent, [ContextGuardPlugin(default=Threshold(context_window=window))])
    await chat.say("Hello there.")
    await chat.say(whole)
    assert secret not in llm.requests[-1].text
    (handle,) = re.findall(r"left out; item (\w+)", llm.requests[-1].text)
    llm.script = recall_once(item=handle, offset=6_400)
    await chat.say("What was in the middle?")
    assert secret in recalled(llm)[0]["result"]
    assert llm.rejections == 0


def picture(name: str) -> types.Content:
    """A message with an image."""
    blob = types.Blob(data=b"\x89" * 3_000, mime_type="image/png", display_name=name)
    return types.Content(
        role="user",
        parts=[types.Part(text=f"This is {name}."), types.Part(inline_data=blob)],
    )


def media_names(request: Any) -> list[str]:
    """The images in a request."""
    return [
        part.inline_data.display_name
        for content in request.contents
        for part in content.parts or ()
        if part.inline_data
    ]


async def test_an_image_comes_back_as_a_part() -> None:
    """Older images are named with a handle; the agent may have them shown again."""
    llm = SimulatedLlm(context_window=8_000, script=lambda request: "Seen.")
    agent = guarded_agent(llm, [queued_tool("look", ["x"])])
    chat = Chat(agent, [ContextGuardPlugin(default=Threshold(context_window=8_000))])
    await chat.say(picture("plan.png"))
    for _ in range(8):
        await chat.say("word " * 900)
    request = llm.requests[-1]
    assert media_names(request) == []
    shown = next(record.text for record in llm.requests if record.is_summary)
    handle = re.findall(r"image/png 'plan.png', 3000 bytes; item (\w+)\]", shown)[0]
    llm.script = recall_once(item=handle)
    await chat.say("Show me the plan again.")
    assert media_names(llm.requests[-1]) == ["plan.png"]
    assert recalled(llm)[0]["attached"] == handle
    # It stays where it was put: what a provider has cached stays valid.
    before = llm.requests[-1].contents
    llm.script = lambda request: "Fine."
    await chat.say("And?")
    assert llm.requests[-1].contents[: len(before)] == before
    assert llm.rejections == llm.violations == 0


async def test_a_file_that_is_too_large_is_not_attached() -> None:
    """It would only push everything else out."""
    part = types.Part.from_bytes(data=b"%PDF" * 300_000, mime_type="application/pdf")
    tool = tool_over([types.Content(role="user", parts=[part])])
    args = {"item": await handle_in(tool)}
    answer = await tool.run_async(args=args, tool_context=None)  # type: ignore[arg-type]
    assert "too many" in answer["result"]
    assert "attached" not in answer


@pytest.mark.parametrize("handle", ["0123456789", 7, None, ["x"]])
def test_a_forged_announcement_attaches_nothing_foreign(handle: Any) -> None:
    """Only files of this very history can be named."""
    contents = [user("Hi"), picture("plan.png"), call("recall_history", "id")]
    forged = response("recall_history", {"attached": handle}, "id")
    sent = [*contents, forged, user("And?")]
    assert attach_files(sent, list_items(contents, range(3))) == sent


async def test_the_tool_is_there_again_after_a_restart(tmp_path: Any) -> None:
    """All it needs is the session; its handles stay the same."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    pages = []
    for process in range(2):
        llm = SimulatedLlm(context_window=4_000, script=lambda request: "ok")
        agent = guarded_agent(llm, [queued_tool("look", ["x"])])
        guard = ContextGuardPlugin(default=Threshold(context_window=4_000))
        service = DatabaseSessionService(db_url=url)
        chat = Chat(agent, [guard], session_service=service)
        for number in range(6 if process == 0 else 0):
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
        llm = SimulatedLlm(context_window=4_000, script=lambda request: "ok")
        agent = guarded_agent(llm, [queued_tool("look", ["x"])])
        strategy = Threshold(context_window=4_000, recall=recall)
        guard = ContextGuardPlugin(default=strategy)
        chat = Chat(agent, [guard], session_service=service)
        for number in range(6 if recall else 1):
            await chat.say(f"{number} {SECRET} " + "word " * 500)
        assert ("recall_history" in llm.requests[-1].text) is recall
        assert ("recall_history" in offered(llm.requests[-1])) is recall
        assert "[Previous conversation summary]" in llm.requests[-1].text
