"""A coordinator with two sub-agents, each guarded in its own way.

All three share one conversation. Each has its own summary of it, its own thresholds
and its own keys in session state.
"""

from google.adk.agents import Agent
from google.adk.apps import App

from contextguard_adk import ContextGuardPlugin, SlidingWindow, Threshold

from .offline import WINDOW_TOKENS, offline_model


def search_papers(topic: str) -> dict[str, list[str]]:
    """Finds papers on a topic.

    Args:
        topic: What the papers are about.
    """
    return {
        "papers": [
            f"{1990 + number}: On {topic}, part {number}. We measure {topic} on "
            f"{number * 113} samples and find an effect of {number * 7 % 30} percent, "
            "which earlier work had missed because its samples were too small."
            for number in range(1, 21)
        ]
    }


def get_style_guide() -> dict[str, list[str]]:
    """Returns the rules for texts."""
    return {
        "rules": [
            f"Rule {number}: say what is new first, then how it was found; keep "
            f"section {number} under {number * 20} words; no figure without its unit."
            for number in range(1, 21)
        ]
    }


researcher = Agent(
    name="researcher",
    description="Finds out what is known about a topic.",
    model=offline_model("researcher"),  # Or a name: "gemini-flash-latest".
    instruction="Search for papers, then say in a few sentences what they found.",
    tools=[search_papers],
)

writer = Agent(
    name="writer",
    description="Writes and revises texts.",
    model=offline_model("writer"),
    instruction="Follow the style guide. Write from what the researcher found.",
    tools=[get_style_guide],
)

root_agent = Agent(
    name="coordinator",
    model=offline_model("coordinator"),
    instruction="Hand research to the researcher and writing to the writer.",
    sub_agents=[researcher, writer],
)

app = App(
    name="coordinator",
    root_agent=root_agent,
    plugins=[
        ContextGuardPlugin(
            agents={
                # Many short messages: keep the newest ones word for word.
                "researcher": SlidingWindow(
                    max_messages=12, context_window=WINDOW_TOKENS
                ),
                # Long texts: one summary of everything, as late as possible.
                "writer": Threshold(context_window=WINDOW_TOKENS),
            },
            default=Threshold(context_window=WINDOW_TOKENS),
        )
    ],
)
