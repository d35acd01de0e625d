"""Mistakes of a user's second hour: what is refused, with one line that helps."""

from __future__ import annotations

import os
from typing import Any

import pytest

from contextguard_adk import (
    ConfigError,
    ContextGuardPlugin,
    Costs,
    Pipeline,
    SlidingWindow,
    Threshold,
)
from contextguard_adk.strategies import SummaryCompaction, TokenWindow
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import Chat, answer_text, call_part, guarded_agent, queued_tool
from tests.lines import tells
from tests.recorded import own_lines

MISTAKES: dict[str, str] = {
    "Threshold(context_window=500)": ("Threshold: context_window = 500: …greater…1000"),
    "Threshold(context_window='128k')": (
        "Threshold: context_window = '128k': …a valid integer"
    ),
    "Threshold(keep_messages=10)": (
        "Threshold: keep_messages = 10: unknown key. Did you mean 'keep'? Known here: …"
    ),
    "Threshold(token_threshold=9_000)": (
        "Threshold: token_threshold = 9000: unknown key. Did you mean 'trigger'? …"
    ),
    "Threshold(model='gpt-5.4-mini')": (
        "Threshold: model = 'gpt-5.4-mini': unknown key. Did you mean 'summarizer'? …"
    ),
    "SlidingWindow(compaction_interval=9)": (
        "SlidingWindow: compaction_interval = 9: unknown key. Did you mean "
        "'max_messages'? …"
    ),
    "SlidingWindow(max_mesages=9)": (
        "SlidingWindow: max_mesages = 9: unknown key. Did you mean 'max_messages'? …"
    ),
    "SlidingWindow(max_messages=2)": ("SlidingWindow: max_messages = 2: …greater…4"),
    "Threshold(trigger=5.0)": (
        "Threshold: trigger = 5.0: tokens as an int, at least 1,000, a part of "
        'the window as a float, more than 0 and at most 1, or "auto" are '
        "expected"
    ),
    "Threshold(keep=True)": (
        "Threshold: keep = True: tokens as an int, at least 0, a part of the "
        'window as a float, at least 0 and less than 1, or "auto" are expected'
    ),
    "Threshold(summarizer=3)": (
        "Threshold: summarizer = 3: a BaseLlm, or the name of a model, is expected"
    ),
    "Threshold(ahead=3, keep_tools='x')": (
        "Threshold: ahead = 3: a part of the trigger as a float, more than 0 "
        "and less than 1, or a boolean is expected; keep_tools = 'x': a list is "
        "expected, such as ['x']"
    ),
    "Threshold(keep_tools=['a', 1])": "Threshold: keep_tools.1 = 1: …a valid string",
    "Threshold(keep_tools={'a': 1})": "Threshold: keep_tools: a list is expected",
    "SlidingWindow(keep_tools=7)": "SlidingWindow: keep_tools = 7: a list is expected",
    "Pipeline(reducers='ClearToolResults')": (
        "Pipeline: reducers = 'ClearToolResults': a list is expected, such as "
        "['ClearToolResults']"
    ),
    "Pipeline(window=TokenWindow)": (
        "Pipeline: window = <class "
        "'contextguard_adk.strategies.reducers.TokenWindow'>: a reducer, a "
        "table of settings or false is expected. Did you mean TokenWindow(…)?"
    ),
    "Pipeline(window={'budget_tokens': -1})": (
        "Pipeline: window.budget_tokens = -1: tokens as an int, at least 100, a part "
        'of the window as a float, more than 0 and less than 1, or "auto" are expected'
    ),
    "Pipeline(reducers=(1,))": (
        "Pipeline: reducers.0 = 1: a Reducer, or a table with `reducer`, its "
        "dotted path, is expected"
    ),
    "SummaryCompaction(trigger_threshold=0.4)": (
        "SummaryCompaction: trigger_threshold (0.4) must be larger than "
        "target_token_ratio (0.5)"
    ),
    "Costs(input=-1)": ("Costs: input = -1: …greater…0; output: …required"),
    "ContextGuardPlugin(warning_threshold=70)": (
        "ContextGuardPlugin: warning_threshold = 70: …less…1"
    ),
    "ContextGuardPlugin(prices={'x': {'inputs': 1, 'output': 1}})": (
        "ContextGuardPlugin: prices.x.input: …required; prices.x.inputs = 1: unknown "
        "key. Did you mean 'input'? Known here: …"
    ),
    "ContextGuardPlugin(default='threshold')": (
        "default must be a Strategy, a sync function of the callback context, "
        "or None, not str: 'threshold'. Did you mean Threshold()? Names of "
        "strategies are for files"
    ),
    "ContextGuardPlugin(agents={'a': Pipeline})": (
        "agents['a'] must be a Strategy, a sync function of the callback "
        "context, or None, not the class Pipeline. Did you mean Pipeline()?"
    ),
    # What could never act.
    "Threshold(context_window=9_000, trigger=10_000)": (
        "Threshold: trigger (10,000) is never reached: context_window is 9,000"
    ),
    "Threshold(recall=False, recall_page_tokens=500)": (
        "Threshold: recall_page_tokens has no effect with recall=False"
    ),
    "Threshold(summarizer='gemini-flash-latest', reuse_prompt_cache=True)": (
        "Threshold: reuse_prompt_cache=True has no effect with a summarizer: "
        "only the agent's own model can use the cache of its prompts"
    ),
}
NAMES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        ContextGuardPlugin,
        Costs,
        Pipeline,
        SlidingWindow,
        Threshold,
        SummaryCompaction,
        TokenWindow,
    )
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_line(typed: str) -> None:
    """Where it is, what was given, what is accepted, and what may have been meant."""
    with pytest.raises((ConfigError, TypeError)) as caught:
        eval(typed, {**NAMES})
    text = str(caught.value)
    assert tells(MISTAKES[typed], text), text


async def test_a_summary_alone_acts_at_the_trigger() -> None:
    """Without a window to drop messages, the summary is what a pipeline has."""
    script: list[Reply] = []
    for turn in range(8):
        script += [call_part("look"), f"Noted {turn}."]
    llm = SimulatedLlm(context_window=100_000, script=script)
    pipeline = Pipeline(
        trigger=4_000, window=None, summary=SummaryCompaction(preserve_recent_count=4)
    )
    tools = [queued_tool("look", [{"rows": ["a pump in hall B"] * 200}] * 8)]
    chat = Chat(guarded_agent(llm, tools), [ContextGuardPlugin(default=pipeline)])
    for turn in range(8):
        assert answer_text(await chat.say(f"Look at {turn}."))

    assert llm.summaries
    assert max(request.prompt_tokens for request in llm.requests) < 10_000


@pytest.mark.parametrize(
    ("model", "variable"),
    [
        ("gemini-flash-latest", "GOOGLE_API_KEY"),
        ("claude-haiku-4-5", "GOOGLE_CLOUD_PROJECT, GOOGLE_CLOUD_LOCATION"),
    ],
)
async def test_a_summarizer_without_a_key_is_told(
    model: str,
    variable: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which model, and what to set; excerpts take the place of its summaries."""
    for name in [*os.environ]:
        if name.endswith(("_API_KEY", "_TOKEN")) or name.startswith("GOOGLE_CLOUD"):
            monkeypatch.delenv(name)

    llm = SimulatedLlm(context_window=4_000)
    guard = Threshold(context_window=4_000, summarizer=model)
    chat = Chat(guarded_agent(llm), [ContextGuardPlugin(default=guard)])
    for _ in range(4):
        assert answer_text(await chat.say("And so on. " * 400))
    lines = [line for line in own_lines(caplog) if line.startswith("The summarizer")]

    assert f"The summarizer of agent 'agent', '{model}', failed (" in lines[0]
    assert "it has no valid key: set " in lines[0]
    assert variable in lines[0]
    assert not llm.rejections
