"""A pipeline with a reducer of one's own, and no summary while that is enough.

Stock prices are out of date after a minute: what the tool returned earlier need not be
summarized. The reducer drops it, and the notes that the user made stay word for word.
"""

from google.adk.agents import Agent
from google.adk.apps import App

from contextguard_adk import ContextGuardPlugin, Pipeline

from .offline import WINDOW_TOKENS, offline_model
from .reducers import ForgetResults


def get_quotes(market: str) -> dict[str, list[str]]:
    """Lists the current prices of a market.

    Args:
        market: "Lisbon", "Zurich" or "Tokyo".
    """
    rows = [
        f"{market[:2].upper()}{number:03d} bid {number * 7919 % 997}.10 "
        f"ask {number * 7919 % 997}.35 volume {number * 104729 % 99991}"
        for number in range(70)
    ]
    return {"quotes": rows}


root_agent = Agent(
    name="broker",
    model=offline_model(),  # Or any model that ADK knows: "gemini-flash-latest".
    instruction="You watch stock markets. Fetch fresh quotes before you answer.",
    tools=[get_quotes],
)

app = App(
    name="custom_strategy",
    root_agent=root_agent,
    plugins=[
        ContextGuardPlugin(
            agents={
                "broker": Pipeline(
                    context_window=WINDOW_TOKENS,
                    window=None,
                    tool_output=None,
                    summary=None,  # Only where nothing else helps.
                    reducers=(ForgetResults(tools=frozenset({"get_quotes"})),),
                )
            }
        )
    ],
)
