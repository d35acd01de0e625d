"""Reading back what was compacted: items, pages, searches, and what is out of reach."""

# ruff: noqa: RUF001 - Letters of other scripts look like those of Latin.

from __future__ import annotations

import asyncio
import copy
import functools
import json
import re
import time
import unicodedata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.agents.run_config import RunConfig
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.plugins.logging_plugin import LoggingPlugin
from google.adk.sessions import InMemorySessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Pipeline, SlidingWindow, Threshold
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm
from contextguard_adk.testing import call as tool_call
from tests.builders import (
    SUMMARY_BEGIN,
    Chat,
    answer_text,
    call,
    call_part,
    calls,
    event,
    model,
    queued_tool,
    response,
    response_part,
    responses,
    user,
)
from tests.chats import (
    DEMAND,
    Changing,
    agent_requests,
    guarded_chat,
    hide,
    seed,
    without_head,
    words,
)
from tests.talks import workflow_agents

WINDOW = 4_000
SECRET = "zq-77-hidden"

Asked = dict[str, Any] | Callable[[list[str]], dict[str, Any]]


def newest_parts(request: LlmRequest) -> list[types.Part]:
    """What stands at the end of a request, with an image that was read back."""
    return [part for c in request.contents[-2:] for part in c.parts or ()]


def answers_of(llm: SimulatedLlm) -> list[dict[str, Any]]:
    """What the tool has answered, as the model saw it when each answer was new."""
    newest = [request.contents[-1] for request in agent_requests(llm)]
    found = [p.function_response for c in newest for p in c.parts or ()]
    return [r.response or {} for r in found if r and r.name == "recall_history"]


def pages_of(llm: SimulatedLlm) -> list[dict[str, Any]]:
    """What the tool has answered, as the model saw it, each answer once."""
    contents = [c for request in agent_requests(llm) for c in request.contents]
    found = [p.function_response for c in contents for p in c.parts or ()]
    answers = [r.response or {} for r in found if r and r.name == "recall_history"]
    return list({str(answer): answer for answer in answers}.values())


def recalling(*asked: Asked, to_end: bool = True) -> Callable[[LlmRequest], Reply]:
    """A model that reads this, each to its last page."""
    waiting = list(asked)
    pages = list[str]()
    args = dict[str, Any]()

    def script(request: LlmRequest) -> Reply:
        found = [part.function_response for part in newest_parts(request)]
        pages.extend(str((r.response or {})["result"]) for r in found if r)
        more = re.search(r"offset=(\d+)\)\]$", pages[-1]) if pages else None
        if more and to_end:
            assert int(more[1]) > args.get("offset", 0)
            args["offset"] = int(more[1])
        elif waiting:
            following = waiting.pop(0)
            args.clear()
            args.update(following(pages) if callable(following) else following)
        else:
            return "Done."
        return tool_call("recall_history", **args)

    return script


async def read(
    contents: Sequence[types.Content],
    *asked: Asked,
    page_tokens: int = 2_000,
    to_end: bool = True,
    is_each_once: bool = True,
    plugins: Sequence[BasePlugin] = (),
) -> list[str]:
    """The pages that an agent reads of a history that was compacted altogether."""
    llm = SimulatedLlm(context_window=200_000, token_ratio=1.0)
    llm.summary_replies = lambda _: "Nothing of note."
    strategy = Threshold(
        context_window=200_000, preview_tokens=None, recall_page_tokens=page_tokens
    )
    agent = {"tools": [queued_tool("look", ["x"])]}
    chat = guarded_chat(llm, strategy, agent=agent, plugins=plugins)

    await seed(chat, model(words(2_000, "FILLER")), *contents, state=DEMAND)
    llm.script = recalling(*asked, to_end=to_end)
    assert answer_text(await chat.say("Read.")) == "Done."

    assert llm.rejections == llm.violations == 0
    assert llm.summaries == 1
    answers = pages_of(llm) if is_each_once else answers_of(llm)
    return [page["result"] for page in answers]


# --- items and pages ---

IMAGE = types.Part.from_bytes(data=b"1234", mime_type="image/png")
CODE = types.Part.from_executable_code(code="x = 1", language=types.Language.PYTHON)
OUTPUT = types.Part.from_code_execution_result(
    outcome=types.Outcome.OUTCOME_OK, output="1"
)


async def test_the_list_tells_items_apart() -> None:
    """Messages, results, files and code are listed with what they are about."""
    thought = types.Part(text="hmm", thought=True)
    contents = [
        user("Read  it,\nplease."),
        call("read", "0", path="a.py"),
        response("read", "x" * 1_200, "0"),
        types.Content(role="model", parts=[thought, types.Part(text="word " * 40)]),
        types.Content(role="model", parts=[CODE, OUTPUT]),
        types.Content(role="user", parts=[IMAGE]),
        calls(call_part("look", "1", at="c"), call_part("look", "2", at="d")),
        responses(response_part("look", "yy", "2"), response_part("look", "y", "1")),
        call("adk_request_credential", "3", token="s3cret"),
        response("adk_request_credential", "s3cret", "3"),
        call("recall_history", "4", query="x"),
        response("recall_history", "a page", "4"),
    ]

    [page] = await read(contents, {})
    for expected in (
        '"Read it, please.", 17 characters',
        'read result {"path":"a.py"}, 1,200 characters',
        f'model message "{"word " * 12}…", 200 characters',
        "image/png, 4 bytes",
        'look result {"at":"d"}, 2 characters',
        'look result {"at":"c"}, 1 characters',
        "code that was run, 5 characters",
        "output of code, 1 characters",
    ):
        assert page.count(expected) == 1, page
    assert page.index('{"at":"c"}') < page.index('{"path":"a.py"}')
    for hidden in ("s3cret", "credential", "hmm", "recall_history result"):
        assert hidden not in page


def rows(number: int, count: int = 120, secret: str = "") -> str:
    """A tool result with nothing special in it but one line, two thirds down."""
    lines = [f"row {number}-{i} host-{i * 7 % 97} ok" for i in range(count)]
    return "\n".join([*lines[: count * 2 // 3], secret, *lines[count * 2 // 3 :]])


async def test_pages_hold_all_that_there_is() -> None:
    """The pages of an item are the item."""
    text = rows(9, 300, SECRET)
    contents = [call("read", path="a"), response("read", text)]
    contents += [user(f"note {n % 60}: the lamp {n % 60} is broken") for n in range(90)]
    pages = await read(
        contents,
        {"query": "row 9-1"},
        lambda pages: {"item": pages[0].splitlines()[1][1:11]},
        {},
        {"query": "lamp broken"},
        page_tokens=400,
    )

    assert all(len(page) <= 4 * 400 for page in pages)
    item = [page for page in pages if "read result" in page.splitlines()[0]]
    assert len(item) > 2
    assert "".join(p.split("\n", 1)[1].rsplit("\n", 1)[0] for p in item) == text

    lists = [page for page in pages if "newest first:" in page.splitlines()[0]]
    searched = [page for page in lists if " match" in page.splitlines()[0]]
    for some in ([page for page in lists if page not in searched], searched[1:]):
        found = re.findall(r"note (\d+):", "".join(some))
        assert sorted(int(number) for number in found) == list(range(60))


async def test_the_best_matches_come_first() -> None:
    """A phrase goes before single words, many words before few."""
    far = "token " + "x" * 500 + " the token of api-7 " + "y" * 500 + " api-7"
    said = ["token to deploy", "DEPLOY Token", "red", "red 2", "green, red", far]
    pages = await read(
        [*(user(text) for text in said), model("令牌是 7")],
        {"query": "deploy token"},
        {"query": "red green"},
        {"query": "api-7 token"},
        {"query": "部署 令牌"},
        {"query": {"q0": 80}},
        {"query": "red", "offset": 99},
        {"offset": 1e400},
        {"item": ["a"]},
        to_end=False,
    )

    found = [re.findall(r"^\[\w+ .*\]\n(.*)", page, re.MULTILINE) for page in pages]
    assert found[0][:2] == ["DEPLOY Token", "token to deploy"]
    assert found[1][0] == "green, red"
    assert {*found[1]} == {"green, red", "red", "red 2"}
    assert " the token of api-7 " in found[2][0]
    assert found[3] == ["令牌是 7"]
    assert "Nothing matches" in pages[4]
    assert "matches; offset 99" in pages[5]
    assert "items, newest first" in pages[6]
    assert "no item" in pages[7]


class Ticking(BasePlugin):
    """Measures for how much CPU time other tasks stand still while a tool works."""

    def __init__(self) -> None:
        super().__init__(name="ticking")
        self.standstills: list[float] = []

    async def _tick(self) -> None:
        before = time.process_time()
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            self.standstills[-1] = max(self.standstills[-1], now - before)
            before = now

    async def before_tool_callback(self, **_: Any) -> None:
        """Begins to tick."""
        self.standstills.append(0.0)
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)

    async def after_tool_callback(self, **_: Any) -> None:
        """Ends it."""
        await asyncio.sleep(0)
        self._task.cancel()


@pytest.mark.parametrize(
    ("megabytes", "max_seconds"),
    [(1, 0.25), pytest.param(4, 1.0, marks=pytest.mark.slow)],
)
async def test_no_query_holds_the_event_loop(
    megabytes: int, max_seconds: float
) -> None:
    """Not even of single letters, in a long history, a part of it in one message."""
    nasty = ["a e i o", " ", ".*+?([", "(a+)+$", "a" * 199 + "b", "the ing 令牌 ion"]
    nasty += ["令牌是部署" * 40, "a-b b-a a.b " * 16, "xbooks nötebooks e-books"]
    queries = [
        *nasty,
        " ".join(chr(code) for code in range(97, 123)),
        "token note book " * 12,
    ]

    ticking = Ticking()
    texts = [words(500) for _ in range(250 * megabytes)]
    texts += ["a" * (250_000 * megabytes), words(62_500 * megabytes)]
    await read(
        [(user, model)[n % 2](text) for n, text in enumerate(texts)],
        *({"query": query} for query in queries),
        to_end=False,
        plugins=[ticking],
    )

    assert len(ticking.standstills) == len(queries)
    # Of CPU: on a busy machine the thread that ranks goes on for some switches.
    assert max(ticking.standstills) < max_seconds


@pytest.mark.parametrize(("query", "is_found"), [("te", False), ("7", True)])
async def test_the_shortest_words_stand_alone(query: str, is_found: bool) -> None:
    """A letter within a word is no match."""
    [page] = await read([user("notes of api-7")], {"query": query}, to_end=False)
    assert ("notes of api-7" in page) is is_found


# --- what a search finds ---


def shown(page: str) -> list[str]:
    """The first lines of the items on a page."""
    return re.findall(r"^\[\w{10} .*\]\n(.*)", page, re.MULTILINE)


SAID = [
    *(
        f"And the other day, the {n} of them were at the sea with the dog."
        for n in range(30)
    ),
    "We painted the garden gate with Ana.",
    "Rule HAT271 failed.",
    "Rule HAT2711 failed.",
    "See src/app/foo.py:12 for the cause.",
    "See src/app/foo.py:123 and 12 more.",
    "The log has ERR-4711.",
    "The log has ERR 4712 and number 4711.",
    'Got {"user_id=mia_li_3668": 1}.',
    "Mia and Li have 3668 points.",
    "The red lamp broke.",
    "A lamp, and it is red.",
    "Use getUserName there.",
    "Él llegó mañana al café.",
    "我们的部署令牌是七。",
    "รหัสของเซิร์ฟเวอร์คือเจ็ด",
    "서버에서 오류가 났다.",
    "Где лежат ключи?",
    "The egg is in an odd nest.",
    "We will add a nest.",
]
FINDS = {
    "the rare word": ("where was the garden, and the other", 30),
    "another form": ("painting gates", 30),
    "whole code": ("HAT271", 31),
    "code as typed": ("hat2711", 32),
    "place in a file": ("src/app/foo.py:12", 33),
    "beside other words": ("what is wrong at `src/app/foo.py:12`?", 33),
    "code with a hyphen": ("ERR-4711", 35),
    "field": ("user_id=mia_li_3668", 37),
    "id": ("mia_li_3668", 37),
    "half an id": ("mia_li_36", 37),
    "phrase": ("red lamp", 39),
    "words": ("lamp red it", 40),
    "part of a name": ("username", 41),
    "part of a code": ("AT2711", 32),
    "no accents": ("cafe manana", 42),
    "other accents": ("CAFÉ", 42),
    "Chinese": ("部署令牌", 43),
    "Chinese, in pieces": ("令牌 我们", 43),
    "Thai": ("เซิร์ฟเวอร์", 44),
    "Korean": ("서버 오류", 45),
    "Cyrillic": ("КЛЮЧИ", 46),
    "short, doubled": ("odd", 47),
    "short, doubled, plural": ("eggs", 47),
    "short, doubled, with an ending": ("adding", 48),
}


@functools.cache
def find_all() -> dict[str, str]:
    """The page that each query finds, in one conversation."""
    queries = [query for query, _ in FINDS.values()]
    asked = [{"query": query} for query in queries]
    reading = read(
        [user(text) for text in SAID], *asked, to_end=False, is_each_once=False
    )
    return dict(zip(queries, asyncio.run(reading), strict=True))


@pytest.mark.parametrize(("query", "number"), FINDS.values(), ids=FINDS)
def test_a_search_finds_words_and_what_was_typed(query: str, number: int) -> None:
    """Rare words and other forms of them; codes and phrases as they were typed."""
    assert shown(find_all()[query])[0] == SAID[number]


def decompose(text: str) -> str:
    """Gives each accent a character of its own, as file names on macOS have it."""
    return unicodedata.normalize("NFD", text)


SPELLINGS = {
    "French text, decomposed": (decompose("L'entrepôt est fermé."), "ENTREPÔT"),
    "French query, decomposed": ("La réunion est finie.", decompose("réunion")),
    "curly quote": ("Il va à l’hôpital demain.", "l'hôpital"),
    "Arabic with vowels": ("يبقى المُستودَع هنا", "المستودع"),
    "Arabic with long strokes": ("هذا مفتـــاح قديم", "مِفتاح"),
    "Arabic alef": ("قرار الإدارة نهائي", "الادارة"),
    "Arabic digits": ("الرمز ٤٧١١", "4711"),
    "Persian joiner": ("او می\u200cماند", "میماند"),
    "Hebrew with vowels": ("הַמַּפְתֵּחַ אבד", "המפתח"),
    "half-width kana": ("倉庫のカギはサトウさんが持つ", "ｶｷﾞ ｻﾄｳ"),
    "kana, decomposed": (decompose("ガソリンを買う"), "ガソリン"),
    "full-width Latin": ("ＡＢＣ－１２３です", "abc-123"),
    "ligature": ("A conﬂict of oﬃce hours.", "office conflict"),
    "Hindi nukta": ("यह फ़ाइल है", "फाइल"),
    "Hindi nasal": ("हम गाँव गए", "गांव"),
    "Malayalam final consonant": ("അവൻ വന്നു", "അവന്\u200d"),
    "Tamil vowel, decomposed": (decompose("அவன் கொடுத்தான்"), "கொடுத்தான்"),
    "Thai vowel": ("น้ำท่วมแล้ว", "น้ํา"),
    "Vietnamese": (decompose("Ông Nguyễn ở Đà Nẵng."), "nguyễn da nang"),
    "Korean, decomposed": (decompose("창고 열쇠는 민수가 가진다"), "창고 열쇠"),
    "Turkish dotless i": ("Isparta'ya gidiyoruz.", "ısparta"),
    "Turkish dotted I": ("Yarın istanbul güzel.", "İSTANBUL"),
    "German sharp s": ("Die Straße ist gesperrt.", "STRASSE"),
    "Greek final sigma": ("Ο ΚΩΣΤΑΣ ΕΦΥΓΕ", "κώστας"),
    "Polish": ("Jedziemy do Łodzi.", "lodzi"),
    "soft hyphens": ("The de\xadploy\xadment stalled.", "deployment"),
    "invisible joiner": ("See ERR\u2060-8822 again.", "err-8822"),
    "special hyphen": ("See ERR\u20118833 again.", "ERR-8833"),
    "trade mark": ("Frobnicator™ was sold.", "frobnicator"),
}


@functools.cache
def find_all_spellings() -> dict[str, str]:
    """The page that each query of `SPELLINGS` finds, in one conversation."""
    contents = [user(text) for text, _ in SPELLINGS.values()]
    asked = [{"query": query} for _, query in SPELLINGS.values()]
    reading = read(contents, *asked, to_end=False, is_each_once=False)
    return dict(zip(SPELLINGS, asyncio.run(reading), strict=True))


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_word_is_found_in_another_spelling(name: str) -> None:
    """A search finds a word in any Unicode form, and shows the text as it was."""
    text, _ = SPELLINGS[name]
    assert shown(find_all_spellings()[name])[0] == text


@pytest.mark.parametrize(
    ("query", "texts"),
    [
        ("गोदाम", ["गोदाम की चाबी यहाँ है", "दाम गिर गए", "गीत और मेला", "द म ग"]),
        ("창고", [decompose("창고는 민수가 지킨다"), "방구석에 있다", "차가 온다"]),
        ("ガギ", [decompose("ガギの店"), "カキの店"]),
    ],
    ids=["Hindi", "Korean", "Japanese"],
)
async def test_a_part_of_a_letter_is_no_match(query: str, texts: list[str]) -> None:
    """A search does not find words that have only parts of the query's letters.

    The first text has the query.
    """
    [page] = await read([user(text) for text in texts], {"query": query})
    assert shown(page) == texts[:1]


@pytest.mark.parametrize(
    "filler",
    [decompose("é "), "a\xad\xad\xad ", "ﷺ ", "ｶﾞ "],
    ids=["accents", "soft hyphens", "long ligatures", "kana"],
)
async def test_an_excerpt_shows_the_match_between_other_spellings(filler: str) -> None:
    """An excerpt shows the match even where folding makes the text before it shorter.

    The same holds where it makes the text longer.
    """
    many = filler * (1_500 // len(filler))
    text = f"{many * 3} the boiler leaks {many * 3}"
    query = {"query": "boiler leaks"}
    [page] = await read([user(text)], query, page_tokens=300, to_end=False)
    assert "the boiler leaks" in page


async def test_common_words_alone_are_no_match() -> None:
    """Beside a rare word; where nothing else is asked for, they are found."""
    queries = [{"query": "the garden"}, {"query": "the"}]
    rare, common = await read([user(text) for text in SAID], *queries, to_end=False)
    assert shown(rare) == [SAID[30]]
    assert len(shown(common)) > 20


async def test_a_page_holds_passages_of_several_items() -> None:
    """Short ones whole; of long ones what is around the match, and more of the best."""
    long = "".join(f"Line {n} of a long report.\n" for n in range(1_000))
    middle = len(long) // 2
    texts = [
        f"{long[:middle]}The boiler of hall {n} leaks. {long[middle:]}" for n in "ab"
    ]
    texts += [f"Boiler {n} was seen, hall {n} was not." for n in range(20)]
    query = {"query": "boiler hall leaks"}
    [page] = await read(
        [user(text) for text in texts], query, page_tokens=800, to_end=False
    )

    assert len(page) <= 4 * 800
    assert page.count("hall a leaks") == page.count("hall b leaks") == 1
    assert sum(text in page for text in texts[2:]) >= 4


async def test_tools_are_found_by_name_and_arguments() -> None:
    """Also by arguments that a title has no room for."""
    contents = [user(text) for text in SAID]
    for number, city in enumerate(("Riga", "Oslo")):
        args = {"columns": ["a long list of columns"] * 4, "city": city}
        contents += [call("find_hotels", str(number), **args)]
        contents += [response("find_hotels", f"{number + 3} rooms", str(number))]

    query = {"query": "find_hotels Oslo"}
    [page] = await read(contents, query, to_end=False)

    assert shown(page)[0].startswith('{"columns"') or shown(page)[0] == "4 rooms"
    assert "4 rooms" in shown(page)[:2]


UNTRUSTED = {
    "operators": 'lamp NEAR(red, 2) AND text:* OR ^"broke" -x',
    "quotes": "\"'`lamp",
    "NUL": "lamp\0red",
    "half a pair": "lamp \ud800",
    "long": "lamp " * 20_000,
    "regex": "lamp (?i)[a-z]+(a+)+$ \\",
    "SQL": "lamp'); DROP TABLE items; --",
}


async def test_no_query_does_harm() -> None:
    """Whatever it holds, its words are found."""
    queries = [{"query": query} for query in UNTRUSTED.values()]
    pages = await read([user(text) for text in SAID], *queries, to_end=False)
    assert all("lamp" in shown(page)[0] for page in pages)


class Timing(BasePlugin):
    """Measures the CPU time that tools take."""

    def __init__(self) -> None:
        super().__init__(name="timing")
        self.seconds = 0.0

    async def before_tool_callback(self, **_: Any) -> None:
        """Begins."""
        self.seconds -= time.process_time()

    async def after_tool_callback(self, **_: Any) -> None:
        """Ends."""
        self.seconds += time.process_time()


@pytest.mark.parametrize(
    ("size_chars", "count"),
    [
        (500_000, 2),
        pytest.param(500_000, 200, marks=pytest.mark.slow),
        pytest.param(4_000_000, 2_000, marks=pytest.mark.slow),
        pytest.param(4_000_000, 4, marks=pytest.mark.slow),
    ],
)
async def test_a_long_history_is_searched_at_once(size_chars: int, count: int) -> None:
    """In many items or in few, in a small multiple of the time to read their words."""
    names = [f"{'abcdefgh'[n % 8]}{n:x}" for n in range(10_007)]
    chars = size_chars // count
    spoken = " ".join(names[n * 7919 % 10_007] for n in range(size_chars // 4))
    texts = [spoken[n * chars : (n + 1) * chars] for n in range(count)]
    query = f"where is {names[5]} in the {names[7]} of mia_li_3668?"
    timing = Timing()
    [page] = await read(
        [(user, model)[n % 2](text) for n, text in enumerate(texts)],
        {"query": query},
        to_end=False,
        plugins=[timing],
    )
    before = time.process_time()

    assert len({word for text in texts for word in re.findall(r"\w+", text)}) > 10_000
    assert names[5] in page
    assert timing.seconds < 10 * (time.process_time() - before) + 0.2


# --- who is offered the tool ---


def offered(request: RecordedRequest) -> list[str | None]:
    """The names of the tools in a request."""
    declared: list[Any] = list(request.config.tools or ())
    found = [tool.function_declarations or () for tool in declared]
    return [declaration.name for group in found for declaration in group]


FORCED = {"function_calling_config": {"mode": "ANY"}}
FREE = {"function_calling_config": {"mode": "AUTO"}}
SEARCH = types.Tool(google_search=types.GoogleSearch())
OFFERS: dict[str, tuple[dict[str, Any], bool]] = {
    "free choice": ({"tool_config": types.ToolConfig.model_validate(FREE)}, True),
    "forced": ({"tool_config": types.ToolConfig.model_validate(FORCED)}, False),
    "built-in tool": ({"tools": [types.Tool(), SEARCH]}, False),
    "schema": ({"response_schema": {"type": "STRING"}}, False),
}


@pytest.mark.parametrize("recall", ["auto", True])
@pytest.mark.parametrize(("config", "is_harmless"), OFFERS.values(), ids=OFFERS)
async def test_auto_offers_where_it_does_no_harm(
    config: dict[str, Any], is_harmless: bool, recall: Any
) -> None:
    """Requests that some provider would refuse with a further tool get none."""

    def configure(request: LlmRequest) -> None:
        request.config = request.config.model_copy(update=copy.deepcopy(config))

    strategy = Threshold(context_window=16_000, recall=recall)
    llm, chat = open_chat(strategy=strategy, before=[Changing(configure)])
    llm.context_window = 16_000
    await seed(chat, model(words(1_500, SECRET)), state=DEMAND)
    await chat.say("Hello.")
    is_offered = recall is True or (recall == "auto" and is_harmless)
    assert ("recall_history" in offered(llm.requests[-1])) is is_offered
    assert ("recall_history" in llm.requests[-1].text) is is_offered
    assert SUMMARY_BEGIN in llm.requests[-1].text


# --- in sessions that were compacted on the way ---


def open_chat(
    window: int = WINDOW,
    results: Sequence[str] = ("x",),
    strategy: Strategy | None = None,
    **settings: Any,
) -> tuple[SimulatedLlm, Chat]:
    """A chat whose agent has one tool, with its model."""
    llm = SimulatedLlm(context_window=window, script=lambda _: "ok")
    llm.summary_replies = lambda _: "Nothing of note."
    chosen = strategy or Threshold(context_window=window)
    agent = {"tools": [queued_tool("look", results)]}
    return llm, guarded_chat(llm, chosen, agent=agent, **settings)


async def fill(chat: Chat, count: int = 3, text: str = "") -> None:
    """Talks until something is compacted."""
    for number in range(count):
        await chat.say(f"{number} {text} " + "word " * 1_000)


async def search(llm: SimulatedLlm, chat: Chat, query: str) -> str:
    """What the agent finds."""
    llm.script = recalling({"query": query}, to_end=False)
    await chat.say("Search it.")
    llm.script = lambda _: "ok"
    return str(pages_of(llm)[-1]["result"])


@pytest.mark.parametrize(
    ("window", "is_streaming"),
    [(4_000, True), pytest.param(8_000, False, marks=pytest.mark.slow)],
)
async def test_what_was_compacted_can_be_read_back(
    window: int, is_streaming: bool
) -> None:
    """The tool appears with the first compaction, not before, and ADK executes it."""
    secret = "the deploy key of api-7 is key-551-gamma"
    results = [
        rows(0, window // 20, secret),
        *(rows(number, window // 20) for number in range(1, 7)),
    ]

    strategy = Threshold(context_window=window, preview_tokens=None)
    llm, chat = open_chat(window, results, strategy, is_streaming=is_streaming)
    looks: list[Reply] = [tool_call("look"), "Noted."]
    llm.script = looks * 7

    for turn in range(7):
        await chat.say(f"Look at number {turn}.")
    assert llm.summaries >= 2
    assert "key-551-gamma" in await search(llm, chat, "deploy key api-7")

    requests = agent_requests(llm)
    had_tool = ["recall_history" in offered(request) for request in requests]
    assert had_tool == [SUMMARY_BEGIN in request.text for request in requests]
    assert {*had_tool} == {True, False}
    assert llm.rejections == llm.violations == 0


async def test_a_small_window_bears_page_after_page() -> None:
    """An agent that recalls all the time overflows nothing."""
    llm, chat = open_chat(results=[rows(n) for n in range(6)])
    recalls: list[Reply] = [
        [tool_call("recall_history", query=f"row {n}-1 host") for n in range(4)]
    ]
    looks: list[Reply] = [tool_call("look"), "Done."]
    llm.script = [*looks * 6, *recalls * 3, "Done."]
    for number in range(6):
        await chat.say(f"Look at {number}.")
    assert answer_text(await chat.say("Now read it all again.")) == "Done."

    pages = [page["result"] for page in pages_of(llm)]
    assert len(pages) >= 4
    assert any("row 1-1 host" in page for page in pages)
    assert llm.rejections == llm.violations == 0
    # Copies are not kept as items of their own.
    assert "recall_history result" not in llm.requests[-1].text


def loading(newest: int) -> RunConfig:
    """A run that loads the newest events alone."""
    return RunConfig(get_session_config=GetSessionConfig(num_recent_events=newest))


def media_names(request: RecordedRequest) -> list[str | None]:
    """The images in a request."""
    parts = [part for content in request.contents for part in content.parts or ()]
    return [part.inline_data.display_name for part in parts if part.inline_data]


@pytest.mark.parametrize(
    ("data", "is_shown"),
    [(b"%PDF" * 700, True), (b"%PDF" * 300_000, False)],
    ids=["small", "large"],
)
async def test_a_file_comes_back_as_a_part(data: bytes, is_shown: bool) -> None:
    """Older files are named with a handle and may be shown again."""
    llm, chat = open_chat(8_000)
    blob = types.Blob(data=data, mime_type="application/pdf", display_name="plan")
    parts = [types.Part(text="This is the plan."), types.Part(inline_data=blob)]
    await chat.say(types.Content(role="user", parts=parts))
    for _ in range(4):
        await chat.say("word " * 1_800)
    assert media_names(llm.requests[-1]) == []
    shown = next(record.text for record in llm.requests if record.is_summary)
    handle = re.findall(r"'plan', \d+ bytes; item (\w+)\]", shown)[0]

    llm.script = recalling({"item": handle})
    await chat.say("Show me the plan again.")
    assert media_names(llm.requests[-1]) == ["plan"] * is_shown
    assert pages_of(llm)[0].get("attached") == (handle if is_shown else None)

    # It stays where it was put: what a provider has cached stays valid.
    before = llm.requests[-1].contents
    llm.script = lambda _: "Fine."
    await chat.say("And?")
    assert llm.requests[-1].contents[: len(before)] == before
    assert llm.rejections == llm.violations == 0


# --- what is in reach ---


async def test_another_session_and_another_user_are_out_of_reach() -> None:
    """Neither through the same plugin, nor through the same session id."""
    llm, other = open_chat(session_id="other")
    chats = {"session_service": other.sessions}
    await fill(other, text=SECRET)
    for session_id, user_id in (("session", "user"), ("other", "eve")):
        place: dict[str, Any] = {"session_id": session_id, "user_id": user_id, **chats}
        chat = Chat(other.app.root_agent, other.app.plugins, **place)
        await fill(chat)
        assert "Nothing matches" in await search(llm, chat, SECRET)
        assert f"{SECRET} word" not in llm.requests[-1].text

    # The owner of the secret finds it.
    assert "user message" in await search(llm, other, SECRET)


@workflow_agents
async def test_another_branch_is_out_of_reach() -> None:
    """What a parallel agent has been told stays with it."""
    left = SimulatedLlm(context_window=WINDOW, script=lambda _: f"Mine is {SECRET}")
    right = SimulatedLlm(context_window=WINDOW, script=lambda _: "ok")
    agents: list[Any] = [
        LlmAgent(name=name, model=llm, tools=[queued_tool("look", ["x"])])
        for name, llm in (("left", left), ("right", right))
    ]
    guard = ContextGuardPlugin(default=Threshold(context_window=WINDOW))
    chat = Chat(ParallelAgent(name="both", sub_agents=agents), [guard])
    await fill(chat)

    assert "Nothing matches" in await search(right, chat, "Mine is zq")
    assert SECRET not in right.requests[-1].text


INTERNAL = ("adk_request_credential", "adk_request_confirmation", "adk_framework")


@pytest.mark.parametrize("name", [*INTERNAL, "a task"])
async def test_what_adk_does_not_show_is_out_of_reach(name: str) -> None:
    """Neither credentials and confirmations nor another task can be recalled."""
    if name == "a task" and "mode" not in LlmAgent.model_fields:
        pytest.skip("this ADK has no tasks")
    contents = [call(name, "1", secret=SECRET), response(name, {"token": SECRET}, "1")]
    if name == "a task":
        contents = [model(SECRET), response("finish_task", "Task completed.")]
    llm, chat = open_chat(run_config=loading(6))
    await chat.say("Hello.")
    for each in (event(content) for content in contents):
        if name == "a task":
            each.isolation_scope = name
        await chat.sessions.append_event(await chat.session(), each)

    await fill(chat)

    assert "Nothing matches" in await search(llm, chat, SECRET)


async def test_what_was_rewound_is_out_of_reach() -> None:
    """And what stays keeps its handle."""
    llm, chat = open_chat()
    await fill(chat, 4, text="marker kept")
    handles = re.compile(r"\[(\w{10}) user message")
    before = {*handles.findall(await search(llm, chat, "marker"))}
    undone = await chat.say("marker undone " + "word " * 1_000)
    await fill(chat, 1, text="later")
    await chat.runner.rewind_async(
        user_id="user",
        session_id="session",
        rewind_before_invocation_id=undone[0].invocation_id,
    )
    await fill(chat, 2, text="again")
    page = await search(llm, chat, "marker")

    assert "undone" not in page
    assert before.intersection(handles.findall(page))


async def test_events_that_a_run_does_not_load_are_in_reach() -> None:
    """With `get_session_config` ADK sends the newest events only."""
    llm, chat = open_chat(run_config=loading(6))
    await chat.say(f"Mind the code {SECRET}.")
    await fill(chat, 7)
    assert SECRET not in str(without_head(llm.requests[-1].contents))
    assert "user message" in await search(llm, chat, f"code {SECRET}")


async def test_what_a_plugin_masks_does_not_come_back() -> None:
    """Of what a run loads the tool reads what the request shows, masked."""
    mask = Changing(partial(hide, SECRET))
    llm, chat = open_chat(before=[mask], run_config=loading(15))
    await fill(chat, 5)
    await chat.say(f"Mind the code {SECRET}.")
    await fill(chat, 3)
    page = await search(llm, chat, f"code {SECRET}")
    assert "Mind the code ****." in page
    assert SECRET not in page


def mask_all(request: LlmRequest) -> None:
    """Masks the secret in texts and in what tools returned."""
    hide(SECRET, request)
    for part in (part for each in request.contents for part in each.parts or ()):
        answer = part.function_response
        if answer and answer.response:
            masked = json.dumps(answer.response).replace(SECRET, "****")
            answer.response = json.loads(masked)


PARTLY: list[Strategy] = [
    Threshold(context_window=WINDOW),
    SlidingWindow(context_window=WINDOW, max_messages=6),
    Pipeline(context_window=WINDOW),
]


@pytest.mark.quick("False-Pipeline", "True-Pipeline")
@pytest.mark.parametrize("strategy", PARTLY, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("is_result", [False, True])
async def test_what_was_masked_stays_so_where_it_is_not_loaded(
    strategy: Strategy, is_result: bool
) -> None:
    """What the agent was never shown is not read from the session either."""
    results = [f"The code is {SECRET}."]
    mask = Changing(mask_all)
    settings: dict[str, Any] = {"before": [mask], "run_config": loading(6)}
    llm, chat = open_chat(WINDOW, results, strategy, **settings)
    llm.script = [tool_call("look"), "Seen."] if is_result else ["Noted."]
    await chat.say("Look at it." if is_result else f"Mind the code {SECRET}.")
    llm.script = lambda _: "ok"
    await fill(chat, 7)
    await search(llm, chat, "mind the code")
    found = [r for e in await chat.events() for r in e.get_function_responses()]
    pages = [str(r.response) for r in found if r.name == "recall_history"]

    assert pages
    assert SECRET not in str(pages)


async def test_plugins_of_adk_hide_nothing() -> None:
    """They are known to mask nothing."""
    llm, chat = open_chat(before=[LoggingPlugin()], run_config=loading(6))
    await chat.say(f"Mind the code {SECRET}.")
    await fill(chat, 7)
    assert "user message" in await search(llm, chat, f"code {SECRET}")


class FailingSessions(InMemorySessionService):
    """Cannot be read while it is down."""

    is_down = False

    async def get_session(self, **place: Any) -> Session | None:
        """Reads the session."""
        if self.is_down:
            raise OSError("down")
        return await super().get_session(**place)


async def test_a_history_that_cannot_be_read_is_said_so() -> None:
    """The tool never ends a turn."""
    service = FailingSessions()
    llm, chat = open_chat(session_service=service, run_config=loading(6))
    await fill(chat)
    script = recalling({"query": "word"})

    def reply(request: LlmRequest) -> Reply:
        service.is_down = True
        return script(request)

    llm.script = reply
    assert answer_text(await chat.say("Search it.")) == "Done."
    service.is_down = False
    assert "cannot be read" in pages_of(llm)[0]["result"]


async def test_nothing_speaks_of_the_tool_once_it_is_turned_off() -> None:
    """ADK ends the turn of an agent that calls a tool which it has not."""
    service = InMemorySessionService()
    for recall in (True, False):
        strategy = Threshold(context_window=WINDOW, recall=recall)
        llm, chat = open_chat(strategy=strategy, session_service=service)
        await fill(chat, 3 if recall else 1, SECRET)
        assert ("recall_history" in llm.requests[-1].text) is recall
        assert ("recall_history" in offered(llm.requests[-1])) is recall
        assert SUMMARY_BEGIN in llm.requests[-1].text
