"""Looks after invoices: few messages, tools that return much."""

import os

from google.adk.agents import Agent
from google.adk.apps import App

from contextguard_adk.testing import SimulatedLlm, call


def list_invoices(month: str) -> dict[str, list[str]]:
    """Lists the invoices of a month.

    Args:
        month: Such as "2026-11".
    """
    return {"invoices": [f"{month}-{number * 7919:06d} paid" for number in range(80)]}


root_agent = Agent(
    name="billing",
    model=os.environ.get("MODEL")
    or SimulatedLlm(
        context_window=8_000,
        script=[call("list_invoices", month="2026-11"), "All are paid."] * 20,
    ),
    instruction="You look after the invoices. Never pay one without being asked.",
    tools=[list_invoices],
)

app = App(name="billing", root_agent=root_agent)
