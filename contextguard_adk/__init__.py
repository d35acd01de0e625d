"""Keeps every Google ADK agent inside its model's context window."""

from contextguard_adk._history.state import request_compaction
from contextguard_adk._measuring.budgets import Budgets
from contextguard_adk._providers.costs import Costs
from contextguard_adk._providers.windows import ModelRegistry
from contextguard_adk._summarizing.compact_tool import CompactTool
from contextguard_adk._summarizing.compose import Compaction
from contextguard_adk._summarizing.context import CompactionContext
from contextguard_adk._summarizing.todos import TodosTool
from contextguard_adk.errors import ConfigError, ContextGuardError, SummaryError
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.strategies import (
    MessageWindow,
    Pipeline,
    Reducer,
    Reduction,
    SlidingWindow,
    Strategy,
    StrategyResult,
    SummaryCompaction,
    Threshold,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.telemetry import (
    CallRecord,
    CompactionRecord,
    PressureRecord,
    Usage,
)

__all__ = [
    "Budgets",
    "CallRecord",
    "CompactTool",
    "Compaction",
    "CompactionContext",
    "CompactionRecord",
    "ConfigError",
    "ContextGuardError",
    "ContextGuardPlugin",
    "Costs",
    "MessageWindow",
    "ModelRegistry",
    "Pipeline",
    "PressureRecord",
    "Reducer",
    "Reduction",
    "SlidingWindow",
    "Strategy",
    "StrategyResult",
    "SummaryCompaction",
    "SummaryError",
    "Threshold",
    "TodosTool",
    "TokenWindow",
    "ToolOutputTruncation",
    "Usage",
    "request_compaction",
]
