"""What holds for any history, any strategy and any summariser.

Histories are generated with texts of every density and size; the summariser answers,
rambles or fails as drawn. The tokens of results are counted by a real tokenizer.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import replace

import pytest
from google.adk.events.event import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk import (
    Budgets,
    Compaction,
    CompactionContext,
    Pipeline,
    SlidingWindow,
    Strategy,
    Threshold,
)
from contextguard_adk.history.coverage import (
    decode_covered,
    encode_covered,
    fingerprint,
)
from contextguard_adk.history.rendering import render_request
from contextguard_adk.history.stored_summary import StoredSummary, SummaryMark
from contextguard_adk.history.view import HistoryView
from contextguard_adk.measuring.budgets import summary_budget_tokens, threshold_tokens
from contextguard_adk.measuring.tokens import estimate_contents_tokens
from contextguard_adk.recovery.fit import reduce_contents
from contextguard_adk.summarizing.summary_call import SummaryModel
from contextguard_adk.summary_store import dump_ledger, load_ledger
from contextguard_adk.testing.provider import count_request_tokens
from tests.builders import MadeHistory, event, histories, model, user

WINDOW_TOKENS = 4_000
MARGIN_TOKENS = 600
"""More than markers, continuation and a short request take."""

DENSITY_ERROR_RATIO = 1.15
"""How far the density of a short text may be below what the tokenizer counts."""

PIECES = {
    "prose": "The old press stands in hall B, behind the second gate. ",
    "digits": "9081726354, 77, 1.000001; ",
    "base64": base64.b64encode(bytes(range(7, 200, 3))).decode(),
    "kana": "古い機械は二番目の門の奥にあります。",
    "markup": '<a href="#">&amp;</a>\n',
    "markers": "[End of conversation]\n[Previous conversation summary]\n",
}


class DrawnSummarizer(BaseLlm):
    """A summariser that answers in one of the drawn ways, call by call."""

    model: str = "drawn"
    moods: Sequence[str] = ("short",)
    calls: int = 0

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers, rambles, says nothing or raises."""
        mood = self.moods[self.calls % len(self.moods)]
        self.calls += 1
        if mood == "raises":
            raise RuntimeError("out of order")
        text = {"short": f"Summary {self.calls}.", "nothing": ""}.get(
            mood, "They spoke of the old press. " * 150
        )
        yield LlmResponse(content=model(text))


@st.composite
def long_histories(draw: st.DrawFn, max_steps: int = 8) -> MadeHistory:
    """Histories in which any text may be long and of any density."""
    made = draw(histories(max_steps))
    for index, content in enumerate(made.contents):
        parts = [_padded(draw, part) for part in content.parts or ()]
        made.contents[index] = content.model_copy(update={"parts": parts})
    return made


def _padded(draw: st.DrawFn, part: types.Part) -> types.Part:
    padding = PIECES[draw(st.sampled_from(sorted(PIECES)))]
    padding *= draw(st.sampled_from([0, 0, 1, 20, 80]))
    if part.text:
        return part.model_copy(update={"text": f"{part.text} {padding}".strip()})
    answer = part.function_response
    if answer and padding:
        answer = answer.model_copy(update={"response": {"rows": [padding, 1, None]}})
        return part.model_copy(update={"function_response": answer})
    return part


def strategies() -> st.SearchStrategy[Strategy]:
    """Any of the strategies, with settings that matter for short histories."""
    return st.one_of(
        st.builds(Threshold, max_compaction_attempts=st.integers(1, 3)),
        st.builds(SlidingWindow, max_turns=st.integers(4, 12)),
        st.just(Pipeline()),
    )


def summarizers() -> st.SearchStrategy[DrawnSummarizer]:
    """Summarisers in every mood."""
    mood = st.sampled_from(["short", "rambles", "nothing", "raises"])
    moods = st.lists(mood, min_size=1, max_size=3)
    return moods.map(lambda drawn: DrawnSummarizer(moods=drawn))


def look_at(
    contents: Sequence[types.Content],
    live: types.Content | None,
    stored: StoredSummary | None = None,
    invocation: str = "now",
) -> HistoryView:
    """A view in which all contents are history."""
    events: list[Event] = [event(content) for content in contents]
    return HistoryView(
        contents,
        events=events,
        user_content=live,
        invocation_id=invocation,
        stored=stored,
    )


def context_of(
    view: HistoryView, llm: BaseLlm, *, is_demanded: bool = False
) -> CompactionContext:
    """What a strategy reads on the first call, when no correction is known."""
    stored = view.stored
    contents = list(view.contents)
    if stored is not None:
        contents = render_request(view, stored, view.covered)
    context = CompactionContext(
        agent="agent",
        reason="requested" if is_demanded else "tokens",
        tokens=0,
        config_heuristic_tokens=20,
        correction=None,
        budgets=Budgets(
            window_tokens=WINDOW_TOKENS,
            threshold_tokens=threshold_tokens(WINDOW_TOKENS),
            summary_tokens=summary_budget_tokens(WINDOW_TOKENS),
        ),
        view=view,
        load_summary_model=lambda: SummaryModel(llm, WINDOW_TOKENS),
    )
    return replace(context, tokens=context.measure(contents))


def compact(strategy: Strategy, context: CompactionContext) -> Compaction | None:
    """Runs a strategy to its end."""
    return asyncio.run(strategy.compact(context))


def reload(stored: StoredSummary) -> StoredSummary:
    """The summary as the next process reads it from session state."""
    return StoredSummary(
        text=stored.text,
        ledger=tuple(load_ledger(dump_ledger(stored.ledger))),
        covered=decode_covered(encode_covered(stored.covered)),
        mark=SummaryMark.from_json(stored.mark.to_json()),
    )


def newest_message(contents: Sequence[types.Content]) -> types.Content:
    """The newest text of the user; one that is nowhere where there is none."""
    spoken = [c for c in contents if c.role == "user" and (c.parts or [])[0].text]
    return spoken[-1] if spoken else user("Hello?")


def kept_indexes(
    contents: Sequence[types.Content], result: Sequence[types.Content]
) -> list[int]:
    """Which contents stand in a result as they were, in the order of the result."""
    places = {id(content): index for index, content in enumerate(contents)}
    return [places[id(content)] for content in result if id(content) in places]


def assert_nothing_is_lost(
    made: MadeHistory, compaction: Compaction, view: HistoryView
) -> None:
    """What is not covered stays, in order; pairs and open calls stay whole."""
    everything = set(range(len(view.contents)))
    result = compaction.contents
    shortened = bool(compaction.stored.mark.truncation)
    if not shortened:
        kept = kept_indexes(view.contents, result)
        assert kept == sorted(everything - compaction.covered)
    head_count = len(result) - len(everything - compaction.covered)
    assert head_count in ((0, 1, 2) if shortened or not compaction.covered else (1, 2))
    assert not made.splits_pair(everything - compaction.covered)
    assert not made.open_calls & compaction.covered


@given(long_histories(), strategies(), summarizers(), st.booleans())
def test_compaction_loses_nothing_and_fits(
    made: MadeHistory, strategy: Strategy, llm: DrawnSummarizer, is_demanded: bool
) -> None:
    """Uncovered contents stay in order; the result fits wherever a result could."""
    contents = made.contents
    view = look_at(contents, newest_message(contents))
    context = context_of(view, llm, is_demanded=is_demanded)
    before = [content.model_dump_json() for content in contents]
    compaction = compact(strategy, context)
    assert [content.model_dump_json() for content in contents] == before
    if compaction is None:
        is_small = context.tokens <= context.limit_tokens
        assert not (context.is_due and view.compactable) or (
            is_small and isinstance(strategy, Pipeline)
        )
        return
    assert_nothing_is_lost(made, compaction, view)
    assert compaction.attempts <= strategy.max_compaction_attempts
    if context.is_due and context.fixed_tokens + MARGIN_TOKENS < context.limit_tokens:
        assert compaction.tokens <= context.limit_tokens
        request = LlmRequest(contents=compaction.contents)
        assert count_request_tokens(request, None, 0) <= WINDOW_TOKENS


@given(long_histories(), strategies(), summarizers())
def test_stored_summary_gives_the_same_request_again(
    made: MadeHistory, strategy: Strategy, llm: DrawnSummarizer
) -> None:
    """Applied once, twice, or after a restart, the stored summary changes nothing."""
    live = newest_message(made.contents)
    view = look_at(made.contents, live)
    compaction = compact(strategy, context_of(view, llm, is_demanded=True))
    if compaction is None:
        return
    for stored in (compaction.stored, reload(compaction.stored)):
        again = look_at(made.contents, live, stored)
        assert again.covered <= compaction.covered
        if not made.open_calls:  # An equal call that was answered may stand for it.
            assert again.covered == compaction.covered
        if again.covered == compaction.covered:
            result = render_request(again, stored, again.covered)
            assert result == compaction.contents


@given(
    long_histories(6),
    histories(4),
    strategies(),
    summarizers(),
    st.sets(st.integers(0, 30)),
)
def test_summary_applied_to_another_history_hides_nothing_new(
    made: MadeHistory,
    later: MadeHistory,
    strategy: Strategy,
    llm: DrawnSummarizer,
    missing: Collection[int],
) -> None:
    """After a rewind, a partial load or new turns only what was covered is replaced."""
    view = look_at(made.contents, newest_message(made.contents))
    compaction = compact(strategy, context_of(view, llm, is_demanded=True))
    if compaction is None:
        return
    answers = made.answered
    gone = {a for a in answers if {a, answers[a]} & {*missing}}
    gone |= {answers[a] for a in gone} | ({*missing} - {*answers, *answers.values()})
    left = [c for i, c in enumerate(made.contents) if i not in gone]
    contents = [*left, *later.contents]
    stored = reload(compaction.stored)
    again = look_at(contents, newest_message(contents), stored, "later")
    old = {fingerprint(content) for content in made.contents}  # Whatever the call ids.
    for index in again.covered:
        assert fingerprint(contents[index]) in old
    assert len(again.covered) <= stored.covered.content_count
    assert all(again.pairs.group_of(i) <= again.covered for i in again.covered)
    if not stored.mark.truncation:
        result = render_request(again, stored, again.covered)
        kept = kept_indexes(contents, result)
        assert kept == [i for i in range(len(contents)) if i not in again.covered]


@given(st.lists(long_histories(3), min_size=2, max_size=3), strategies(), summarizers())
def test_summary_of_a_summary_still_holds(
    rounds: Sequence[MadeHistory], strategy: Strategy, llm: DrawnSummarizer
) -> None:
    """Compaction after compaction every content is covered or there, never both."""
    contents: list[types.Content] = []
    stored: StoredSummary | None = None
    for number, made in enumerate(rounds):
        contents = [*contents, *made.contents, user(f"Request {number}?")]
        view = look_at(contents, contents[-1], stored, f"turn {number}")
        compaction = compact(strategy, context_of(view, llm, is_demanded=True))
        if compaction is None:
            continue
        stored = reload(compaction.stored)
        again = look_at(contents, contents[-1], stored, f"turn {number}")
        assert again.covered <= compaction.covered
        if not any(made.open_calls for made in rounds):
            assert again.covered == compaction.covered
        if not stored.mark.truncation:
            kept = kept_indexes(contents, compaction.contents)
            assert set(kept).isdisjoint(compaction.covered)
            assert set(kept) | compaction.covered == set(range(len(contents)))
        texts = json.dumps([c.model_dump() for c in compaction.contents], default=str)
        assert f"Request {number}?" in texts


@given(long_histories(), st.integers(-2, 30))
def test_any_cut_covers_whole_pairs(made: MadeHistory, keep: int) -> None:
    """Wherever a strategy wants to cut, calls and results stay on one side."""
    view = look_at(made.contents, newest_message(made.contents))
    covered = context_of(view, DrawnSummarizer()).older_than(keep)
    everything = set(range(len(made.contents)))
    assert covered <= everything
    assert not made.splits_pair(everything - covered)
    assert not made.open_calls & covered


@given(
    long_histories(12),
    st.integers(-500, 6_000),
    st.sampled_from([None, 1.0, 2.5]),
    st.booleans(),
)
def test_reduced_contents_are_whole_and_small(
    made: MadeHistory, room_tokens: int, correction: float | None, has_head: bool
) -> None:
    """The newest contents stay in order, pairs whole, within the room."""
    contents = made.contents
    head = [user("[Previous conversation summary]")] if has_head else []
    result = reduce_contents(contents, room_tokens, correction, head)
    rest = result[1:]
    origins = [_origin(contents, content) for content in rest]
    assert origins == sorted(set(origins))
    assert not made.splits_pair(origins)
    if room_tokens >= 200:
        request = LlmRequest(contents=result)
        spelled = 3 * len(result)  # What a chat adds for each message.
        most = room_tokens * DENSITY_ERROR_RATIO + spelled
        assert count_request_tokens(request, None, 0) <= most
    if room_tokens > estimate_contents_tokens(contents) * 5 + 200:
        assert [id(content) for content in rest] == [id(c) for c in contents]


def _origin(contents: Sequence[types.Content], kept: types.Content) -> int:
    """Which content was kept or shortened."""
    for index, content in enumerate(contents):
        if content is kept:
            return index
    roles = [
        index
        for index, content in enumerate(contents)
        if content.role == kept.role and _kinds(content) == _kinds(kept)
    ]
    assert roles
    return roles[-1]


def _kinds(content: types.Content) -> list[tuple[str, str | None]]:
    """What the parts of a content are, and the tools that they speak of."""
    kinds = []
    for part in content.parts or ():
        call, answer = part.function_call, part.function_response
        name = call.name if call else answer.name if answer else None
        kinds.append(("text" if part.text else "call" if call else "answer", name))
    return kinds


@pytest.mark.parametrize("name", sorted(PIECES))
@pytest.mark.parametrize("size_chars", [20_000, 100_000])
def test_giant_messages_are_made_to_fit(name: str, size_chars: int) -> None:
    """A history of two giant messages is brought below the window by any strategy."""
    text = PIECES[name] * (size_chars // len(PIECES[name]))
    contents = [user(text), model("Well."), user(text)]
    for strategy, mood in itertools.product(
        [Threshold(), SlidingWindow(), Pipeline()],
        ["short", "raises"] if size_chars < 100_000 else ["short"],
    ):
        view = look_at(contents, contents[-1])
        llm = DrawnSummarizer(moods=[mood])
        compaction = compact(strategy, context_of(view, llm, is_demanded=True))
        assert compaction is not None
        request = LlmRequest(contents=compaction.contents)
        assert count_request_tokens(request, None, 0) <= WINDOW_TOKENS
