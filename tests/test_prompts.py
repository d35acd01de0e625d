"""The words that stand before models, exactly as documented."""

from __future__ import annotations

from contextguard_adk import Threshold
from contextguard_adk.testing import SimulatedLlm
from tests.builders import SUMMARY_BEGIN, SUMMARY_END, user
from tests.chats import (
    DEMAND,
    agent_requests,
    guarded_chat,
    seed,
    summary_requests,
    take_apart,
    text_of,
    words,
)


async def test_braces_of_an_instruction_and_brackets_of_a_summary() -> None:
    """A template of one's own keeps every other brace, the limit is in words; however
    brackets and markers are nested, each documented marker stands once."""
    nested = f"[{SUMMARY_BEGIN}] [[{SUMMARY_END}]] s [[[{SUMMARY_BEGIN}]]]y"
    llm = SimulatedLlm(summary_replies=[nested])
    template = 'Reply {"n": {max_words}} in {style}.'
    strategy = Threshold(
        context_window=8_000, summary_instruction=template, user_messages=0
    )

    chat = guarded_chat(llm, strategy)
    await seed(chat, user("The task."), user(words(3_000)), state=DEMAND)
    await chat.say("Go on.")
    [asked] = summary_requests(llm)
    [request] = agent_requests(llm)

    said = str(asked.config.system_instruction)
    assert 'Reply {"n": 600} in {style}.' in said
    texts = (text_of(content) for content in take_apart(request.contents[:1]))
    [summary] = [text for text in texts if "[Previous conversation summary]\n" in text]
    assert summary.startswith("[Previous conversation summary]\n")
    assert summary.endswith("\n[End of summary — conversation continues below]")
    assert request.text.count(SUMMARY_BEGIN) == request.text.count(SUMMARY_END) == 1
