"""Answers customers: long chats of short messages."""

import os

from google.adk.agents import Agent
from google.adk.apps import App

from contextguard_adk.testing import SimulatedLlm

root_agent = Agent(
    name="support",
    # Such as "gemini-flash-latest"; without it a model that runs offline.
    model=os.environ.get("MODEL") or SimulatedLlm(context_window=8_000),
    instruction="You help customers with their orders.",
)

app = App(name="support", root_agent=root_agent)
