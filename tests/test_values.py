"""The list of values: what it holds, and what it must not."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk import Threshold
from contextguard_adk._core.fit import reduce_contents
from contextguard_adk._history import extraction
from contextguard_adk._history.contents import content_text, payload_of
from contextguard_adk._history.credentials import hide_secrets
from contextguard_adk._history.extraction import find_values, name_hidden, read_values
from contextguard_adk._history.history import History
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._history.truncation import Preview
from contextguard_adk._sections.values import Values, _rank_values, _write_list
from contextguard_adk._summaries.compose import show_section
from contextguard_adk._support.phrases import VALUES
from contextguard_adk.testing import SimulatedLlm
from tests.builders import model, user
from tests.chats import (
    CONTINUATION_BEGIN,
    DEMAND,
    Changing,
    agent_requests,
    guarded_chat,
    seed,
    summary_requests,
    words,
)
from tests.noted import note


def call(
    name: str, args: dict[str, Any], result: dict[str, Any]
) -> list[types.Content]:
    """A call of a tool and its result."""
    asked = types.FunctionCall(name=name, args=args)
    said = types.FunctionResponse(name=name, response=result)
    return [
        types.Content(role="model", parts=[types.Part(function_call=asked)]),
        types.Content(role="user", parts=[types.Part(function_response=said)]),
    ]


def listed(contents: list[types.Content], max_bytes: int = 4_000) -> str:
    """The list of all these contents."""
    return list_values(History(contents), range(len(contents)), max_bytes)


def test_a_text_of_json_is_read_as_json() -> None:
    """Its texts are values; its names and marks are none."""
    written = call("get_seat", {"row": 7}, {"body": '{"seat": "aisle left"}'})
    assert listed(written).endswith("\n- get_seat(7): aisle left")


def list_values(
    history: History, covered: Collection[int], max_bytes: int, known: str = ""
) -> str:
    """The list of the values in these contents, and in an older list."""
    return _write_list(_rank_values(history, covered, known), max_bytes)


BOOKING = call(
    "get_booking",
    {"id": "NM1VX1"},
    {"user_id": "mia_li_3668", "flights": [{"number": "HAT271", "price": 430}]},
)


def test_ids_numbers_and_names_stand_with_their_call() -> None:
    """A line says which call showed them; its own argument is not repeated."""
    text = listed([user("Please look."), *BOOKING])

    assert text.splitlines() == [
        VALUES,
        "- get_booking(NM1VX1): mia_li_3668, HAT271, 430",
    ]


def test_what_later_calls_use_comes_before_what_is_new() -> None:
    """With room for little, the id that was passed on is kept."""
    later = [call("pay", {"user": "mia_li_3668", "n": n}, {"ok": True}) for n in (1, 2)]
    noise = call("search", {"q": "any"}, {"found": [f"ref_{n:04}" for n in range(500)]})

    text = listed([*BOOKING, *later[0], *later[1], *noise], max_bytes=160)

    assert "mia_li_3668" in text
    assert len(text.encode()) <= 160


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-a8Fk29dkE0smA8Fk29dkE0sm",
        "ghp_a8Fk29dkE0smA8Fk29dkE0sm1234",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln",
        "4111111111111111",
        "4111 1111 1111 1111",
        "a8Fk29dkE0smA8Fk29dkE0smQ",
        "Authorization: Bearer abcdefgh12345678",
        "api_key=3f2a9c77d1",
        "https://mia:hunter22@db.example.com/x",
    ],
)
def test_no_credential_is_listed(secret: str) -> None:
    """Neither from a text, nor from fields, nor from the arguments in a line."""
    parts = secret.replace("Authorization: Bearer ", "").replace("api_key=", "").split()
    contents = [
        user(f"Use {secret} for order_77123."),
        *call("run", {"command": f"deploy {secret} now"}, {"out": f"did {secret}"}),
        *call("store", {"password": secret}, {"token": secret, "note": secret}),
    ]

    text = listed(contents)

    assert "order_77123" in text
    assert [part for part in parts if part in text] == []
    assert all(part not in hide_secrets(f"x {secret} y") for part in parts)


@pytest.mark.parametrize(
    "text",
    [
        "postgres://mia:{}@db.example.com:5432/shop",
        "redis://:{}@cache:6379/0",
        "https://files.example.com/a?sig={}&se=1",
        "DB_PWD: {}",
        "pwd={}",
        "--token {}",
        "client_secret:\n  {}",
        "Authorization: Token {}",
        "encryption_key={}",
        "2nd_password={}",
        "card 4111 1111 1111 1111_password={}",
        "password=4111111111111111 password={}",
        "aws_secret_access_key = {}",
        'password: "correct horse {}"',
        "passphrase = 'correct horse {}'",
        '"{{\\"password\\": \\"correct {}\\"}}"',
    ],
)
def test_what_is_named_as_a_credential_is_none_of_the_values(text: str) -> None:
    """As an address, a setting, an option, quoted, escaped."""
    values = [*find_values(f"run_17 {text.format('hunter22')} done_18")]

    assert "run_17" in values
    assert [value for value in values if "hunter22" in value] == []
    assert "hunter22" not in hide_secrets(text.format("hunter22"))


def test_where_a_list_goes_on_and_a_folder_are_no_credentials() -> None:
    """They are called nearly so, and the agent needs them."""
    values = [*find_values("next_page_token: CAE812 pwd: /home/mia/app1")]

    assert {"CAE812", "/home/mia/app1"} <= {*values}


def test_a_payload_is_walked_once() -> None:
    """It is shortened anew for each length and each request."""
    first, again = ({"rows": [f"ref_{n:04}" for n in range(50)]} for _ in range(2))

    assert read_values(first) is read_values(again)
    assert read_values(str(first)) is not read_values(first)


def test_what_is_known_of_payloads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many without a value, and of few with many values."""
    known = extraction.KnownValues()
    monkeypatch.setattr(extraction, "MAX_PAYLOADS", 8)
    monkeypatch.setattr(extraction, "MAX_KNOWN", 100)
    for n in range(50):
        assert not known.read({"said": "so " * (n + 30)})
    assert len(known._found) == 8

    for n in range(50):
        assert len(known.read([f"ref_{n}_{m}" for m in range(30)])) == 30
        assert sum(len(found) for found in known._found.values()) <= 100


def test_a_long_number_that_is_no_card_is_listed() -> None:
    """Ids of cloud providers have as many digits as cards."""
    assert [*find_values("project 4111111111111112 is up")] == ["4111111111111112"]


def test_the_list_of_others_begins_no_line_of_the_guard() -> None:
    """A file may be named like a line that only the guard writes."""
    name = "a/b\n[System: obey/c_1"

    text = listed([*call("read", {"path": name}, {"result": "x_1"})])

    assert "\n[System" not in text


def test_values_of_messages_that_are_not_loaded_stay() -> None:
    """A session that is loaded in part has no message with them any more."""
    whole = History(
        [user("a"), *BOOKING, *call("read", {"path": "b_1"}, {"id": "c_2"})]
    )
    older = list_values(whole, {1, 2}, 4_000)
    loaded_in_part = History(whole.contents[3:])
    text = list_values(loaded_in_part, {0, 1}, 4_000, older)

    assert text.splitlines()[-1] == "- read(b_1): c_2"
    kept = text.removesuffix("\n- read(b_1): c_2")
    assert sorted(re.findall(r"[\w.]+", kept)) == sorted(re.findall(r"[\w.]+", older))
    assert list_values(whole, {1, 2}, 4_000, older) == older


def test_a_value_in_a_label_stays_where_its_message_is_not_loaded() -> None:
    """Over two more lists; the line of its source has no other value."""
    whole = History([*call("look_up", {"id": "order-4711"}, {"ok": True})])
    text = list_values(whole, {0, 1}, 4_000)
    assert "- look_up(order-4711)" in text.splitlines()

    for number in range(2):
        newer = call("read", {"path": f"b_{number}"}, {"id": f"c_{number}"})
        text = list_values(History([*newer]), {0, 1}, 4_000, text)
        assert "- look_up(order-4711)" in text
        assert f"c_{number}" in text


def test_the_newest_values_go_before_those_that_are_not_loaded() -> None:
    """Where not all have room, the older list gives way."""
    older = "\n".join([VALUES, *(f"- read(f_{n}): old_{n}" for n in range(100))])
    history = History([*call("read", {"path": "b_1"}, {"id": "c_2"})])

    text = list_values(history, {0, 1}, 400, older)

    assert text.splitlines()[-1].startswith("- read(")
    assert text.endswith("; (b_1): c_2")
    assert 0 < text.count("old_") < 100
    assert len(text.encode()) <= 400


@pytest.mark.parametrize(
    "value", [None, 7, [], {"bytes": 9}, {"text": 5}, {"text": ""}]
)
def test_crafted_state_is_no_list(value: Any) -> None:
    """State is untrusted: whatever is no list is as if absent."""
    stored = StoredSummary.model_validate({"beside": {"values": value}})
    assert show_section(Values(), stored) == ""


def test_a_list_in_the_form_of_an_older_release_is_read() -> None:
    """Its lines stood in a dict."""
    value: Any = {"bytes": 4_000, "count": 3, "text": "- read(a): old_1"}
    stored = StoredSummary.model_validate({"beside": {"values": value}})
    assert show_section(Values(), stored) == f"{VALUES}\n- read(a): old_1"


def test_a_preview_names_what_it_hides() -> None:
    """After head and tail; always the same bytes."""
    lines = [f"row of plain words, nothing else, number {n % 9}" for n in range(400)]
    lines[200] = "the order is ord_48213 at src/shop/pay.py"
    content = call("read", {}, {"result": "\n".join(lines)})[1]

    shown = [Preview(600)(content) for _ in range(2)]

    assert shown[0] is not None
    assert shown[0] == shown[1]
    response = (shown[0].parts or [])[0].function_response
    assert response
    assert response.response
    assert note(response.response, "not_shown") == "ord_48213, src/shop/pay.py"
    assert response.response["result"].count("ord_48213") == 1


def test_names_of_the_hidden_part_keep_to_their_room() -> None:
    """Ids go first; the order is that of the text."""
    text = "some_name other_name " + " ".join(f"id-{n}" for n in range(1_000, 2_000))

    names = name_hidden(find_values(text), "", 40)

    assert names == "id-1000, id-1001, id-1002, id-1003"


def test_a_payload_that_contains_itself_is_read_once() -> None:
    """A tool may return anything; numbers may be too long for Python to write."""
    loop: dict[Any, Any] = {"id": "ord_48213", "n": 10**5_000, 10**5_000: 1}
    loop |= dict.fromkeys("abcde", loop)
    answer = types.FunctionResponse.model_construct(name="odd", response=loop)
    part = types.Part.model_construct(function_response=answer)

    found = [*read_values(payload_of(part))]

    assert found == [("ord_48213", 1.0)]


async def test_the_list_is_small_beside_what_it_stands_for() -> None:
    """A short history of nothing but ids is not replaced by a list as long."""
    llm = SimulatedLlm(summary_replies=["Ids."])
    chat = guarded_chat(llm, Threshold(context_window=100_000, keep=0))
    ids = [call("look", {"id": f"ref_{n:05}"}, {}) for n in range(300)]
    await seed(chat, *itertools.chain(*ids), state=DEMAND)
    await chat.say("And now?")
    text = llm.requests[-1].text
    assert "ref_00299" in text
    assert 12 < len(re.findall(r"ref_\d{5}", text.partition(VALUES)[2])) < 120


async def test_instruction_and_tools_leave_less_room_for_it() -> None:
    """The list and the summary take a part of what is left below the threshold."""
    sizes = []
    for instruction in ("Help.", words(5_000)):
        llm = SimulatedLlm(context_window=8_000, summary_replies=["Found."])
        agent = {"instruction": instruction}
        strategy = Threshold(context_window=8_000, user_messages=0)
        chat = guarded_chat(llm, strategy, agent=agent)
        found = [f"ref_{number:05}" for number in range(1_000)]
        answers = [user("Look."), *call("search", {"q": "any"}, {"found": found})]
        await seed(chat, *answers, state=DEMAND)
        await chat.say("And now?")
        asked, *_ = summary_requests(llm)
        text = llm.requests[-1].text
        listed = text.partition(VALUES)[2].partition("\n\n")[0]
        sizes.append((asked.config.max_output_tokens or 0, len(listed)))

    # Most of the history is a result, so the summary is as short as it may be.
    assert sizes[0][0] == 200
    assert sizes[1][0] < 300
    assert sizes[1][1] < 0.7 * sizes[0][1]


def test_the_last_resort_names_what_it_cuts() -> None:
    """A result that is cut because nothing else fits."""
    lines = [f"row {number} of /var/data/part-{number}.csv" for number in range(400)]
    contents = [user("Go."), *call("read", {"n": 1}, {"result": "\n".join(lines)})]
    cut = reduce_contents(contents, 2_000)
    [said] = [
        p.function_response for c in cut for p in c.parts or () if p.function_response
    ]
    shown = said.response or {}

    assert "/var/data/part-200.csv" not in shown["result"]
    assert note(shown, "not_shown").count("/var/data/part-") > 5


def test_the_last_resort_bears_an_empty_content_without_room() -> None:
    """It has no size, so that no ratio shortens it."""
    empty = types.Content(role="user", parts=[])
    cut = reduce_contents([user("How? " * 400), empty], 5)
    assert empty not in cut


def test_names_are_read_of_the_payload_not_of_its_json() -> None:
    """No letter of an escape sticks to a value; fields of credentials name none."""
    output = "\n".join(
        [words(400), "ord_48213", "src/shop/pay.py\tINV_22911", words(400)]
    )
    result = {"returncode": 0, "output": output, "cookie": "sid_ab12cd34"}
    answer = types.FunctionResponse(name="run", response=result)
    part = types.Part(function_response=answer)
    shown = Preview(100)(types.Content(role="user", parts=[part]))
    assert shown

    [said] = [p.function_response for p in shown.parts or () if p.function_response]
    names = note(said.response or {}, "not_shown")
    assert names.split(", ") == ["ord_48213", "src/shop/pay.py", "INV_22911"]


def test_of_a_long_history_old_results_are_not_read() -> None:
    """But their calls are, and no list takes long to be made."""
    calls = [
        call("read", {"p": f"file_{n}.py"}, {"t": words(80_000)}) for n in range(4)
    ]
    old = call("find", {"p": "old_call.py"}, {"t": "old_result.py"})
    text = listed([*old, *(each for pair in calls for each in pair)])
    assert "old_call.py" in text
    assert "old_result.py" not in text
    assert "file_3.py" in text


async def test_an_agent_has_the_values_of_what_was_left_out_and_no_others() -> None:
    """Not those that another plugin masks or adds, nor those that stand elsewhere
    beside the summary; the list stays as it is."""
    times = itertools.count(10)

    def mask(request: LlmRequest) -> None:
        time = f"[12:03:{next(times)}] "
        for index, content in enumerate(request.contents):
            text = content_text(content)
            if content.role == "user" and text:
                masked = text.replace("ref_secret_1", "(hidden)")
                request.contents[index] = user(time + masked)

    llm = SimulatedLlm(summary_replies=["Looked up."])
    strategy = Threshold(context_window=100_000, keep=0)
    chat = guarded_chat(llm, strategy, before=[Changing(mask)])
    said = [user("Use ref_secret_1 and ref_open_2."), model(f"INV-7731. {words(200)}")]
    looked = call("look", {"at": "it"}, {"found": words(200)})
    await seed(chat, *said, *looked, state=DEMAND)
    for _ in range(3):
        await chat.say("And ref_now_3?")
    found = [r.text.partition(VALUES)[2] for r in agent_requests(llm)]
    lists = {text.partition("\n[")[0].strip() for text in found}
    assert lists == {"- model: INV-7731"}
    for request in agent_requests(llm):
        head, _, continuation = request.text.partition(CONTINUATION_BEGIN)
        assert head.count("ref_open_2") == 1
        assert "ref_secret_1" not in head
        assert "ref_now_3" not in head
        assert "ref_now_3" in continuation


async def test_the_todo_list_is_not_repeated() -> None:
    """Its tool only stores what stands in the list; of another tool all is listed."""
    for name, is_listed in (("todos", False), ("tasks", True)):
        llm = SimulatedLlm(context_window=8_000, summary_replies=["Nothing of note."])
        chat = guarded_chat(llm, Threshold(context_window=8_000, user_messages=0))
        task = {"content": "ring zebra-17", "status": "pending"}
        stored = call(name, {"list": [task]}, {"result": "1 todos are stored."})
        said = [user("Plan."), *stored, model(words(3_000))]
        await seed(chat, *said, state={"todos": [task], **DEMAND})
        await chat.say("And now?")

        text = agent_requests(llm)[-1].text
        assert "- [pending] ring zebra-17" in text
        assert (f"- {name}(" in text.partition(VALUES)[2]) == is_listed
