"""What a strategy can ask of a compaction, without a Runner around it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.genai import types

from contextguard_adk import Budgets, Compaction, CompactionContext
from contextguard_adk.history.coverage import cover, fingerprint
from contextguard_adk.history.pairs import pair_contents
from contextguard_adk.history.stored_summary import StoredSummary, SummaryMark
from contextguard_adk.history.view import HistoryView
from contextguard_adk.measuring.budgets import summary_budget_tokens, threshold_tokens
from contextguard_adk.summarizing.compose import Drafts
from contextguard_adk.summarizing.context import Reason
from contextguard_adk.summarizing.items import INDEX_GAP
from contextguard_adk.summarizing.summary_call import SummaryModel
from contextguard_adk.testing import SimulatedLlm
from tests.builders import call, calls, event, model, response, user
from tests.builders import call_part as part

WINDOW = 4_000
"""Threshold 3,200 tokens, summaries of 400."""


def words(token_count: int, name: str = "") -> str:
    """Prose of four bytes for each token, recognisable by its name."""
    return f"{name} {'notebooks ' * token_count}"[: 4 * token_count]


def text_of(content: types.Content) -> str:
    """The texts of a content."""
    return "\n".join(item.text for item in content.parts or () if item.text)


def small_talk(count: int, size_tokens: int = 1) -> list[types.Content]:
    """Alternating messages, the last of them the user's."""
    return [
        (user if (count - number) % 2 else model)(words(size_tokens, f"m{number}"))
        for number in range(count)
    ]


def tool_work(count: int, size_tokens: int = 1) -> list[types.Content]:
    """A task and then nothing but calls and results."""
    contents = [user("The task.")]
    for number in range(count):
        result = words(size_tokens, f"r{number}")
        contents += [call("look", n=number), response("look", result)]
    return contents


def summary_of(
    contents: Sequence[types.Content],
    text: str = "The old summary.",
    ledger: Sequence[str] = (),
    **mark: Any,
) -> StoredSummary:
    """A stored summary that a model wrote of these contents."""
    settings = {
        "invocation": "before",
        "model_summary_chars": len(text),
        "model_covered_count": len(contents),
        "has_continuation": False,
        **mark,
    }
    prints = [fingerprint(content) for content in contents]
    return StoredSummary(text, tuple(ledger), cover(prints), SummaryMark(**settings))


def context(
    contents: Sequence[types.Content],
    llm: SimulatedLlm | None = None,
    *,
    window_tokens: int = WINDOW,
    tokens: int = 0,
    fixed_tokens: int = 0,
    reason: Reason = "tokens",
    correction: float | None = 1.0,
    stored: StoredSummary | None = None,
    user_content: types.Content | None = None,
    transient: Sequence[types.Content] = (),
) -> CompactionContext:
    """What a strategy reads when these contents are the request."""
    summary_model = SummaryModel(llm, 1_000_000) if llm else None
    view = HistoryView(
        contents,
        events=[event(content) for content in contents if content not in transient],
        user_content=user_content or (contents[-1] if contents else None),
        invocation_id="now",
        stored=stored,
    )
    return CompactionContext(
        agent="agent",
        reason=reason,
        tokens=tokens,
        config_heuristic_tokens=fixed_tokens,
        correction=correction,
        budgets=Budgets(
            window_tokens=window_tokens,
            threshold_tokens=threshold_tokens(window_tokens),
            summary_tokens=summary_budget_tokens(window_tokens),
        ),
        view=view,
        load_summary_model=lambda: summary_model,
    )


def answering(*replies: Any) -> SimulatedLlm:
    """A summariser that gives these answers."""
    return SimulatedLlm(summary_replies=list(replies))


# --- Budgets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "tokens", "is_due"),
    [
        ("tokens", 3_199, False),
        ("tokens", 3_200, True),
        ("requested", 1, True),
        ("overflow", 1, True),
    ],
)
def test_a_compaction_is_due(reason: Reason, tokens: int, is_due: bool) -> None:
    """At the threshold, or where someone demands it."""
    assert context([], tokens=tokens, reason=reason).is_due is is_due


def test_defaults_are_those_of_a_strategy_test() -> None:
    """A context without a model and todos makes mechanical summaries."""
    whole = context(small_talk(3))
    bare = CompactionContext(
        agent="agent",
        reason="tokens",
        tokens=0,
        config_heuristic_tokens=0,
        correction=None,
        budgets=whole.budgets,
        view=whole.view,
    )
    assert bare.load_summary_model() is None
    assert bare.load_todos() == ""


@pytest.mark.parametrize(
    ("correction", "tokens"), [(None, 150), (1.0, 100), (2.0, 200)]
)
def test_requests_are_measured_in_real_tokens(
    correction: float | None, tokens: int
) -> None:
    """The heuristic, scaled by what is known; by 1.5 while nothing is."""
    measured = context([], correction=correction, fixed_tokens=40)
    assert measured.measure([user(words(60))]) == tokens


def test_dense_text_is_measured_by_its_density() -> None:
    """Base64 takes more tokens than prose of that length."""
    dense = user("q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQ" * 100)
    assert context([]).measure([dense]) > 1.5 * 3_200 / 4


def test_fixed_part_is_what_no_compaction_removes() -> None:
    """Instruction, open calls and what is no history; the rest may go."""
    note = user(words(30, "note"))
    contents = [*small_talk(3, 100), note, call("wait", text=words(20))]
    fixed = context(contents, fixed_tokens=50, transient=[note]).fixed_tokens
    assert fixed == pytest.approx(50 + 30 + 20 + 5, abs=5)


@pytest.mark.parametrize(
    ("fixed_tokens", "limit_tokens"),
    [(0, 3_200), (2_799, 3_200), (2_800, 3_880), (3_900, 3_880)],
)
def test_a_compacted_request_stays_under_its_limit(
    fixed_tokens: int, limit_tokens: int
) -> None:
    """The threshold; near a large fixed part as much as the window takes."""
    measured = context([], fixed_tokens=fixed_tokens)
    assert measured.limit_tokens == limit_tokens
    stored = summary_of([])
    for tokens, fits in ((limit_tokens, True), (limit_tokens + 1, False)):
        assert measured.fits(Compaction(stored, frozenset(), [], tokens)) is fits


# --- Choosing what to cover -------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_count", "covered"),
    [
        pytest.param(-1, {0, 1, 2, 3, 4}, id="less than none"),
        pytest.param(0, {0, 1, 2, 3, 4}, id="none"),
        pytest.param(1, {0, 1, 2, 3}, id="one"),
        pytest.param(4, {0}, id="all but one"),
        pytest.param(5, set(), id="all"),
        pytest.param(99, set(), id="more than all"),
    ],
)
def test_newest_contents_stay(keep_count: int, covered: set[int]) -> None:
    """Everything older is covered."""
    assert context(small_talk(5)).older_than(keep_count) == covered


async def test_files_that_were_read_back_are_part_of_what_has_to_fit() -> None:
    """They stand beside the summary, behind the results that announce them."""
    attached = user("word " * 4_000)
    bare = context([user("a"), model("b"), user("c")], tokens=3_300)
    full = replace(bare, attach_files=lambda contents: [*contents, attached])
    covered = bare.older_than(1)
    compactions = [await tested.summarize(covered) for tested in (bare, full)]
    assert compactions[1].contents[-1] is attached
    assert compactions[1].tokens > compactions[0].tokens + 4_000
    assert [bare.fits(compaction) for compaction in compactions] == [True, False]


def test_an_index_that_was_cut_off_leaves_a_gap() -> None:
    """The next one does not pretend to be the whole."""
    old, new = [user("a" * 400), model("b" * 400)], [user("c" * 400), user("d")]
    for stored in (summary_of(old), None):
        tested = context([*old, *new], window_tokens=32_000, stored=stored)
        drafts = replace(tested, has_recall=True).drafts
        draft = drafts.write("text", frozenset(range(3)), (), 0)
        assert "ccc" in draft.index
        assert (INDEX_GAP in draft.index) is (stored is not None)
        assert ("aaa" in draft.index) is (stored is None)


def test_there_may_be_nothing_to_cover() -> None:
    """An empty history, or one of open calls only, has nothing to summarise."""
    assert context([]).older_than(0) == frozenset()
    assert context([call("wait")]).older_than(0) == frozenset()


@pytest.mark.parametrize("keep_count", range(22))
def test_no_cut_splits_a_pair(keep_count: int) -> None:
    """A result never stays without its call, nor a call without its result."""
    contents = tool_work(10)
    covered = context(contents).older_than(keep_count)
    for index, partners in pair_contents(contents).partners.items():
        assert {partner in covered for partner in partners} == {index in covered}


def test_covered_contents_stay_covered() -> None:
    """What a model has summarised is added to what is newly chosen."""
    contents = small_talk(9)
    stored = summary_of(contents[:4])
    assert context(contents, stored=stored).older_than(2) == frozenset(range(7))
    assert context(contents, stored=stored).older_than(5) == frozenset()


def test_mechanically_covered_contents_are_chosen_anew() -> None:
    """Only a model's summary counts: the originals are still there."""
    contents = small_talk(9)
    stored = summary_of(contents[:6], model_covered_count=2)
    chosen = context(contents, stored=stored)
    assert chosen.view.covered == frozenset(range(6))
    assert chosen.view.model_covered == frozenset(range(2))
    assert chosen.older_than(3) == frozenset(range(6))
    assert chosen.older_than(5) == frozenset(range(4))


def test_open_calls_are_never_covered() -> None:
    """A call that nothing answers yet stays, with what was answered beside it."""
    contents = [
        user("The task."),
        calls(part("look", "1"), part("wait", "2")),
        response("look", "found", "1"),
        user("And?"),
    ]
    assert context(contents).older_than(0) == {0, 3}


def test_expectation_is_that_of_a_full_length_summary() -> None:
    """The estimate before paying is close to what comes out."""
    contents = small_talk(9, 300)
    expecting = context(contents)
    covered = expecting.older_than(3)
    expected = expecting.expect(covered)
    assert expected == pytest.approx(3 * 300 + 400 + 300 + 60 + 40, rel=0.1)


# --- A summary by a model ---------------------------------------------------------


async def test_summary_takes_the_place_of_what_it_covers() -> None:
    """The stored summary knows its text, its scope and what it stands for."""
    contents = small_talk(7, 100)
    compacting = replace(context(contents, answering("Short.")), scope="here")
    compaction = await compacting.summarize(compacting.older_than(3))
    assert compaction.covered == {0, 1, 2, 3}
    assert compaction.contents[1:] == contents[4:]
    assert compaction.tokens == compacting.measure(compaction.contents)
    stored = compaction.stored
    assert stored.text == stored.model_text == "Short."
    assert not stored.is_mechanical
    assert stored.covered.content_count == 4
    assert stored.mark == SummaryMark(
        scope="here",
        invocation="now",
        request=fingerprint(contents[-1]).hex(),
        has_continuation=False,
        model_summary_chars=6,
        model_covered_count=4,
    )
    assert compacting.failures == []


async def test_summariser_gets_what_is_new_and_the_previous_summary() -> None:
    """What a model has summarised already is not shown again."""
    contents = small_talk(9, 50)
    llm = answering("Merged.")
    stored = summary_of(contents[:4], ledger=["m0 said", "m2 said"])
    compacting = replace(
        context(contents, llm, stored=stored), load_todos=lambda: "[Current todo list]"
    )
    compaction = await compacting.summarize(compacting.older_than(0))
    (request,) = llm.requests
    assert "The old summary." in request.text
    assert "[Current todo list]" in request.text
    for number in range(9):
        is_shown = f"m{number} " in request.text
        assert is_shown is (number >= 4)
    assert compaction.stored.text == "Merged."
    # The ledger goes on where the old one stopped.
    excerpts = [excerpt.split()[0] for excerpt in compaction.stored.ledger]
    assert excerpts == ["m0", "m2", "m4", "m6", "m8"]


async def test_summary_of_a_mechanical_part_reads_the_originals() -> None:
    """What was only excerpted is shown to the model in full."""
    contents = small_talk(9, 50)
    llm = answering("Good.")
    text = "By a model.\nuser: m2 …"
    stored = summary_of(
        contents[:6], text, model_summary_chars=11, model_covered_count=2
    )
    compacting = context(contents, llm, stored=stored)
    compaction = await compacting.summarize(compacting.older_than(0))
    (request,) = llm.requests
    assert "By a model.\n</previous-summary" in request.text
    assert [n for n in range(9) if f"m{n} " in request.text] == list(range(2, 9))
    assert not compaction.stored.is_mechanical


async def test_a_shorter_summary_can_be_asked_for() -> None:
    """A budget of its own replaces the usual one."""
    llm = answering("One.", "Two.")
    compacting = context(small_talk(5, 100), llm)
    covered = compacting.older_than(0)
    await compacting.summarize(covered)
    await compacting.summarize(covered, 123)
    assert [r.config.max_output_tokens for r in llm.requests] == [400, 123]


def test_attempts_are_noted() -> None:
    """A compaction says how many summaries it took."""
    compaction = Compaction(summary_of([]), frozenset(), [], 7)
    assert compaction.attempts == 1
    assert compaction.after(3) == replace(compaction, attempts=3)


# --- The live request -------------------------------------------------------------


async def compact(asked: CompactionContext) -> str:
    """Summarises everything; returns the continuation."""
    compaction = await asked.summarize(asked.older_than(0))
    assert len(compaction.contents) >= 2
    return text_of(compaction.contents[1])


@pytest.mark.parametrize(
    ("size_tokens", "correction", "is_whole"),
    [
        pytest.param(1_200, 1.0, True, id="30 %"),
        pytest.param(1_201, 1.0, False, id="more than 30 %"),
        pytest.param(800, None, True, id="30 % by the default"),
        pytest.param(801, None, False, id="more than 30 % by the default"),
        pytest.param(600, 2.0, True, id="30 % of a dense tokenizer"),
        pytest.param(601, 2.0, False, id="more than 30 % of a dense tokenizer"),
    ],
)
async def test_live_request_is_whole_up_to_thirty_percent(
    size_tokens: int, correction: float | None, is_whole: bool
) -> None:
    """Beyond that, head and tail are quoted."""
    live = f"{words(size_tokens - 1)}TAIL"
    contents = [*small_talk(4)[:-1], user(live)]
    asked = context(contents, answering("Short."), correction=correction)
    continuation = await compact(asked)
    assert (f"`{live}`" in continuation) is is_whole
    assert ("middle left out" in continuation) is not is_whole
    assert live[:400] in continuation
    assert live[-400:] in continuation


async def test_request_of_a_child_is_quoted_where_it_is_no_content() -> None:
    """What started the invocation is the request, also if nothing shows it."""
    contents = tool_work(3, 50)[1:]
    asked = context(contents, answering("Short."), user_content=user("Find it."))
    assert "`Find it.`" in await compact(asked)


async def test_request_that_stands_beside_the_history_is_not_quoted_twice() -> None:
    """A task text that ADK inserts stays where it is."""
    task = user("Find it.")
    contents = [task, *tool_work(3, 50)[1:]]
    asked = context(
        contents, answering("Short."), user_content=user("Find it."), transient=[task]
    )
    compaction = await asked.summarize(asked.older_than(0))
    assert sum("Find it." in text_of(item) for item in compaction.contents) == 1
    assert "`" not in text_of(compaction.contents[-1])


async def test_a_resumed_turn_has_the_generic_continuation() -> None:
    """A tool's result is no request."""
    contents = [user("Buy."), call("approve"), response("approve", words(100))]
    asked = context(contents, answering("Short."), user_content=contents[-1])
    continuation = await compact(asked)
    assert "`" not in continuation
    assert "Continue where it leaves off" in continuation


# --- Without a model --------------------------------------------------------------


async def test_without_a_model_the_newest_part_stays() -> None:
    """A mechanical summary covers no more than it must."""
    contents = small_talk(21, 200)
    compacting = context(contents, tokens=4_200)
    compaction = await compacting.summarize(compacting.older_than(0))
    kept = [content for content in compaction.contents if content in contents]
    assert kept == contents[-len(kept) :]
    assert 0.2 * 3_200 <= 200 * len(kept) <= 0.45 * 3_200
    assert compaction.stored.is_mechanical
    assert compaction.stored.model_text == ""
    assert compaction.tokens <= 3_200


async def test_without_a_model_the_newest_tool_results_stay() -> None:
    """Also where there is no message to cut at between calls and results."""
    contents = tool_work(12, 250)
    compacting = context(contents, tokens=3_300)
    compaction = await compacting.summarize(compacting.older_than(0))
    kept = [content for content in compaction.contents if content in contents]
    assert kept == contents[-len(kept) :]
    assert 2 <= len(kept) // 2 <= 5


@pytest.mark.parametrize("place", range(2, 24, 2))
async def test_a_message_among_tool_results_does_not_cost_the_newest(
    place: int,
) -> None:
    """Wherever the user has last spoken, the newest part that fits stays."""
    contents = tool_work(12, 250)
    contents.insert(place + 1, user("And one thing more."))
    compacting = context(contents, tokens=3_300, user_content=contents[place + 1])
    compaction = await compacting.summarize(compacting.older_than(0))
    kept = [content for content in compaction.contents if content in contents]
    assert len(kept) >= 4
    assert kept == contents[-len(kept) :]
    assert compaction.tokens <= 3_200


async def test_without_a_model_nothing_stays_where_nothing_fits() -> None:
    """One giant content is excerpted like the rest."""
    contents = [user("The task."), model(words(5_000, "GIANT"))]
    compacting = context(contents, tokens=5_000, user_content=contents[0])
    compaction = await compacting.summarize(compacting.older_than(0))
    assert compaction.covered == {0, 1}
    assert compaction.tokens <= 3_200
    assert "GIANT" in compaction.stored.text
    assert "left out" in compaction.stored.text


async def test_a_single_content_may_be_excerpted() -> None:
    """A first message that fills the window has no older part to cover."""
    contents = [user(words(5_000, "GIANT"))]
    compacting = context(contents, tokens=5_000)
    compaction = await compacting.summarize(compacting.older_than(0))
    assert compaction.covered == {0}
    assert compaction.tokens <= 3_200


async def test_a_failing_model_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    """The strategy gets a compaction all the same, and may read what went wrong."""
    compacting = context(small_talk(5, 100), answering(RuntimeError("secret")))
    compaction = await compacting.summarize(compacting.older_than(0))
    assert compaction.stored.is_mechanical
    assert [str(error) for error in compacting.failures] == [
        "the call failed: RuntimeError"
    ]
    assert "mechanical summary" in caplog.text
    assert "secret" not in "".join(record.getMessage() for record in caplog.records)


async def test_a_model_that_failed_is_not_asked_again() -> None:
    """Within one compaction a failing summariser costs one timeout, not several."""
    llm = answering(RuntimeError("down"), "Too late.")
    compacting = context(small_talk(5, 100), llm)
    for _ in range(3):
        compaction = await compacting.summarize(compacting.older_than(0))
        assert compaction.stored.is_mechanical
    assert llm.calls == 1


async def test_mechanical_summary_begins_with_what_a_model_wrote() -> None:
    """Excerpts of an earlier failure are made anew, the model's part stays."""
    contents = small_talk(15, 150)
    text = "By a model.\nuser: an old excerpt"
    stored = summary_of(
        contents[:6], text, model_summary_chars=11, model_covered_count=2
    )
    compacting = context(contents, stored=stored)
    compaction = await compacting.summarize(compacting.older_than(0))
    new = compaction.stored
    assert new.text.startswith("By a model.\nuser: m2 ")
    assert "an old excerpt" not in new.text
    assert new.model_text == "By a model."
    assert new.mark.model_covered_count == 2
    assert new.is_mechanical


# --- Squeezing --------------------------------------------------------------------


def oversized(live_tokens: int, fixed_tokens: int) -> tuple[CompactionContext, Drafts]:
    """A compaction whose parts are all as large as they may be."""
    contents = [user(words(100, f"old{n}")) for n in range(30)]
    contents.append(user(words(live_tokens, "LIVE")))
    squeezing = context(contents, fixed_tokens=fixed_tokens)
    return squeezing, squeezing.drafts


@pytest.mark.parametrize(
    ("fixed_tokens", "ledger", "summary", "quoted"),
    [
        pytest.param(1_100, 1.0, 1.0, 1.0, id="all of it fits"),
        pytest.param(1_250, 0.5, 1.0, 1.0, id="half of the ledger"),
        pytest.param(1_450, 0.0, 1.0, 1.0, id="no ledger"),
        pytest.param(1_700, 0.0, 0.5, 1.0, id="half of the summary"),
        pytest.param(1_850, 0.0, 0.25, 1.0, id="a quarter of the summary"),
        pytest.param(2_200, 0.0, 0.25, 0.5, id="half of the request"),
        pytest.param(2_600, 0.0, 0.25, 0.25, id="a quarter of the request"),
    ],
)
def test_squeezing_touches_the_users_request_last(
    fixed_tokens: int, ledger: float, summary: float, quoted: float
) -> None:
    """The ledger gives way first, then the summary, then the live request."""
    squeezing, drafts = oversized(1_100, fixed_tokens)
    covered = squeezing.older_than(0)
    text = words(400, "SUMMARY")
    stored = drafts.write(text, covered, covered, len(text))
    whole = squeezing.render(stored, covered)
    assert len(stored.ledger) == 31
    result = squeezing.squeeze(whole)
    assert squeezing.fits(result)
    assert len(result.stored.ledger) == int(31 * ledger)
    assert len(result.stored.text) == pytest.approx(1_600 * summary, rel=0.15)
    request = text_of(result.contents[1]).partition("`")[2].partition("`")[0]
    assert len(request) == pytest.approx(4_400 * quoted, rel=0.1)
    assert result.stored.mark.model_summary_chars <= len(result.stored.text)


def test_squeezing_keeps_the_newest_of_the_ledger() -> None:
    """What the user said last is worth the most."""
    squeezing, drafts = oversized(1_100, 1_250)
    covered = squeezing.older_than(0)
    text = words(400, "SUMMARY")
    whole = squeezing.render(drafts.write(text, covered, covered, len(text)), covered)
    ledger = squeezing.squeeze(whole).stored.ledger
    assert ledger == whole.stored.ledger[-len(ledger) :]


def test_squeezing_ends_where_nothing_helps() -> None:
    """Where no version fits, the shortest is taken."""
    squeezing, drafts = oversized(1_100, 9_000)
    covered = squeezing.older_than(0)
    text = words(400, "SUMMARY")
    whole = squeezing.render(drafts.write(text, covered, covered, len(text)), covered)
    result = squeezing.squeeze(whole)
    assert not squeezing.fits(result)
    assert result.tokens < 9_000 + 400
    assert result.stored.ledger == ()


def test_squeezed_requests_have_the_same_bytes_later() -> None:
    """How much of the request is quoted is stored with the summary."""
    squeezing, drafts = oversized(1_100, 2_200)
    covered = squeezing.older_than(0)
    text = words(400, "SUMMARY")
    whole = squeezing.render(drafts.write(text, covered, covered, len(text)), covered)
    result = squeezing.squeeze(whole)
    mark = SummaryMark.from_json(json.dumps(json.loads(result.stored.mark.to_json())))
    again = replace(result.stored, mark=mark)
    later = context(squeezing.view.contents, fixed_tokens=2_200, stored=again)
    assert later.render(again, later.view.covered).contents == result.contents
