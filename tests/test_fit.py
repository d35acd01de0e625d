"""Contents are made to fit with nothing but the contents themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from google.adk.models.cache_metadata import CacheMetadata
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk._measuring.tokens import estimate_contents_tokens
from contextguard_adk._recovery.fit import NOTICE, cut_request, reduce_contents
from contextguard_adk.testing.provider import count_request_tokens, find_violation
from tests.builders import call, model, response, user

PROSE = "The old press stands in hall B, behind the second gate. " * 20
DIGITS = "7f3a-90817263-5544 " * 60
HISTORY = [
    user("Where is the press?"),
    call("search"),
    response("search", PROSE),
    model(PROSE),
    user("And the gate?"),
    call("search"),
    response("search", PROSE),
]


def texts(contents: Sequence[types.Content]) -> list[str]:
    """The text of each part, "" where it has none."""
    return [part.text or "" for content in contents for part in content.parts or ()]


def test_newest_contents_are_kept_as_they_are() -> None:
    """What fits stays the same object, in order, behind a notice; the user's message
    beside the notice is one message with it."""
    kept = reduce_contents(HISTORY, 400, 1.0)
    notice, *joined = kept[0].parts or []
    assert notice.text == NOTICE
    assert [id(part) for part in joined] == [id(p) for p in HISTORY[4].parts or ()]
    assert [id(content) for content in kept[1:]] == [id(c) for c in HISTORY[5:]]


def test_request_of_the_user_stays_without_its_neighbours() -> None:
    """The newest message of the user is kept although newer results take the room."""
    history = [*HISTORY, call("search"), response("search", PROSE)]
    kept = reduce_contents(history, 500, 1.0)
    notice, request = texts(kept[:1])
    assert notice.startswith(f"{NOTICE}\n\n[Done so far for this request")
    assert request == "And the gate?"
    assert kept[1:] == history[-2:]


def test_newest_result_is_shortened_in_the_middle() -> None:
    """Head and tail of a result that alone is too large stay, with its call."""
    history = [user("Go."), call("search"), response("search", f"A{PROSE * 50}Z")]
    kept = reduce_contents(history, 700, 1.0)
    assert texts(kept[:1])[1:] == ["Go."]
    assert kept[1] == history[1]
    (part,) = kept[2].parts or []
    assert part.function_response
    result = (part.function_response.response or {})["result"]
    assert (result[0], result[-1]) == ("A", "Z")
    assert "middle left out" in result


def test_request_that_the_head_does_not_quote_is_kept() -> None:
    """Where the caller says where the request stands, it stays beside the head."""
    head = [user("[Previous conversation summary]")]
    kept = reduce_contents(HISTORY, 330, 1.0, head, live_index=0)
    summary, done, request, newest = texts(kept[:1])
    assert summary == "[Previous conversation summary]"
    assert done.startswith("[Done so far for this request")
    assert (request, newest) == ("Where is the press?", "And the gate?")
    assert kept[1:] == HISTORY[5:]


@pytest.mark.parametrize("room_tokens", range(1_000, 5_000, 250))
def test_list_of_what_is_left_out_takes_no_room_twice(room_tokens: int) -> None:
    """Calls that stay are not listed: the list of the others is not longer for that."""
    history = [user("Ship all.")]
    for number in range(40):
        note = f"{number} {PROSE}"[: 400 * (number % 3)]
        history.append(call("ship", order=f"ORD-{number:04}", note=note))
        history.append(response("ship", PROSE[: 1_200 * (number % 2)] or "ok"))
    kept = reduce_contents(history, room_tokens, 1.0)
    assert "Done so far" in texts(kept)[0]
    assert estimate_contents_tokens(kept) <= room_tokens


@pytest.mark.parametrize("text", [DIGITS, "押して" * 300], ids=["digits", "kana"])
def test_result_fits_by_the_count_of_a_tokenizer(text: str) -> None:
    """The density of what is kept counts, so that digits do not burst the window."""
    history = [
        content
        for _ in range(20)
        for content in (user("Go."), call("search"), response("search", text * 3))
    ]
    for room in (700, 2_000, 6_000):
        request = LlmRequest(contents=reduce_contents(history, room))
        assert count_request_tokens(request, None, 0) <= room


def test_instruction_counts_towards_the_limit() -> None:
    """The room for contents is what the system instruction leaves, if anything."""
    kept: list[int] = []
    for instruction in ("You help.", PROSE, PROSE * 30):
        config = types.GenerateContentConfig(system_instruction=instruction)
        cached = CacheMetadata(fingerprint="f", contents_count=1)
        request = LlmRequest(contents=HISTORY, config=config, cache_metadata=cached)
        assert not cut_request(request, 100_000)
        assert request.cache_metadata is cached
        assert cut_request(request, 1_000)
        assert request.cache_metadata is None
        assert not find_violation(request.contents)
        kept.append(len(request.contents))
    assert kept[1] < kept[0]
