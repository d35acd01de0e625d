"""Stands in for the three agents' models, without a key and without a network.

The user's words decide who works: "find", "search" and "research" go to the
researcher, "write" and "draft" to the writer.
"""

import re
from functools import partial

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.testing import Reply, SimulatedLlm, call

WINDOW_TOKENS = 8_000

WORDS = {
    "writer": ("write", "draft"),
    "researcher": ("find", "search"),
}
RETOLD = re.compile(r"For context:|\[\w+\] ")


def offline_model(agent: str) -> SimulatedLlm:
    """Returns the model of one agent."""
    return SimulatedLlm(
        context_window=WINDOW_TOKENS,
        script=partial(play, agent),
        summary_replies=partial(summarize, agent),
        keep_requests=0,
    )


def play(agent: str, request: LlmRequest) -> Reply:
    """Answers from a tool's result, hands over to who is in charge, or calls a tool."""
    for part in request.contents[-1].parts or []:
        if part.function_response and agent != "coordinator":
            return answer(agent)
    words = find_user_words(request.contents)
    in_charge = next((name for name in WORDS if has_word(words, name)), agent)
    if in_charge != agent:
        return call("transfer_to_agent", agent_name=in_charge)
    if agent == "researcher":
        return call("search_papers", topic=words.split("`")[0][:40])
    if agent == "writer":
        return call("get_style_guide")
    return 'Ask me to find something out ("find …") or to write it up ("write …").'


def answer(agent: str) -> str:
    """What an agent says when its tool has answered."""
    if agent == "researcher":
        return "Twenty papers agree: the effect is real, and 7 to 29 percent strong."
    sentence = "The effect is real, it was measured often, and it is worth knowing. "
    return "Here is the text.\n\n" + sentence * 30


def find_user_words(contents: list[types.Content]) -> str:
    """Returns the line that the user said last; ADK retells what other agents said."""
    for content in reversed(contents):
        if content.role != "user":
            continue
        # The guard's summary may stand before it in the same text.
        text = "\n".join(part.text or "" for part in content.parts or [])
        for line in reversed(text.splitlines()):
            if line and not RETOLD.match(line):
                return line.lower()
    return ""


def has_word(words: str, agent: str) -> bool:
    """Tells whether the user's words are for an agent."""
    return any(word in words for word in WORDS[agent])


def summarize(agent: str, request: LlmRequest) -> str:
    """Writes a summary from what the transcript, and a summary before it, say."""
    text = "\n".join(part.text or "" for part in request.contents[-1].parts or [])
    found = re.findall(r'(?m)^user:\n  (\w.*)$|^- The user asked: "(.+)"$', text)
    asked = list(dict.fromkeys(new or known for new, known in found))
    found = re.findall(
        r'(?m)"topic": ?"([^"\n]+)"|^- Papers were searched: (.+)$', text
    )
    facts = [f"- Papers were searched: {new or known}" for new, known in found]
    if "7 to 29 percent" in text:
        facts.append(
            "- Twenty papers agree: the effect is real, 7 to 29 percent strong."
        )
    if "Here is the text" in text or "A text was written" in text:
        facts.append("- A text was written; the style guide has twenty rules.")
    return "\n".join(
        [
            "## Done",
            f"The {agent} has the floor; all earlier requests were answered.",
            "\n## Key Information",
            *dict.fromkeys(facts),
            "\n## Constraints",
            *(f'- The user asked: "{message}"' for message in asked[-4:]),
            "\n## Decisions & Next Steps",
            "Answer the user's current request.",
            "\n## Language and Tools",
            "English; `search_papers`, `get_style_guide`.",
        ]
    )
