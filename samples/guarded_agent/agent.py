"""One guarded agent whose tool returns a good deal of text.

Every message adds about 1,500 tokens; the model takes 8,000. After a few messages the
history is replaced by a summary, and the conversation goes on.
"""

from google.adk.agents import Agent
from google.adk.apps import App

from contextguard_adk import ContextGuardPlugin, Threshold

from .offline import WINDOW_TOKENS, offline_model


def get_pods(namespace: str) -> dict[str, str]:
    """Lists the pods of a namespace with their state.

    Args:
        namespace: "production", "staging" or "monitoring".
    """
    lines = ["NAME READY STATUS RESTARTS AGE IP NODE"]
    for number in range(54):
        status = "CrashLoopBackOff" if number % 25 == 5 else "Running"
        ready = "0/1" if status != "Running" else "1/1"
        lines.append(
            f"{namespace}-api-{number * 7919 % 9973:04d} {ready} {status} "
            f"{number % 4} {number * 3 + 1}h 10.1.{number}.{number * 37 % 250} "
            f"node-{number % 6}"
        )
    return {"pods": "\n".join(lines)}


root_agent = Agent(
    name="operator",
    model=offline_model(),  # Or any model that ADK knows: "gemini-flash-latest".
    instruction="You look after a Kubernetes cluster. Inspect it before you answer.",
    tools=[get_pods],
)

app = App(
    name="guarded_agent",
    root_agent=root_agent,
    plugins=[
        # With a model that the registry knows, ContextGuardPlugin() is enough.
        ContextGuardPlugin(
            agents={
                # So that each list of pods is shown whole.
                "operator": Threshold(context_window=WINDOW_TOKENS, preview_tokens=0.2)
            },
            summary_artifacts=True,  # For the Artifacts tab.
        )
    ],
)
