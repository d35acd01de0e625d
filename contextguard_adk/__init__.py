"""Keeps every Google ADK agent inside its model's context window."""

from contextguard_adk._providers.costs import Costs
from contextguard_adk._providers.registry import ModelRegistry
from contextguard_adk._recall.compact_tool import CompactTool
from contextguard_adk._runtime.settings import SummaryBudget
from contextguard_adk._runtime.state import request_compaction
from contextguard_adk._sections.pins import PinTool, pin, unpin
from contextguard_adk._sections.todos import TodosTool
from contextguard_adk.errors import ConfigError, ContextGuardError
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.records import (
    CallRecord,
    CompactionRecord,
    PlannedCompaction,
    PlannedSummary,
    PressureRecord,
)
from contextguard_adk.strategies import Pipeline, SlidingWindow, Threshold

__all__ = [
    "CallRecord",
    "CompactTool",
    "CompactionRecord",
    "ConfigError",
    "ContextGuardError",
    "ContextGuardPlugin",
    "Costs",
    "ModelRegistry",
    "PinTool",
    "Pipeline",
    "PlannedCompaction",
    "PlannedSummary",
    "PressureRecord",
    "SlidingWindow",
    "SummaryBudget",
    "Threshold",
    "TodosTool",
    "pin",
    "request_compaction",
    "unpin",
]
