"""The strategies that ship with the package."""

from contextguard_adk.strategies.base import Strategy
from contextguard_adk.strategies.pipeline import Pipeline
from contextguard_adk.strategies.reducers import (
    MessageWindow,
    Reducer,
    StrategyResult,
    SummaryCompaction,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.strategies.reduction import Reduction
from contextguard_adk.strategies.sliding_window import SlidingWindow
from contextguard_adk.strategies.threshold import Threshold

__all__ = [
    "MessageWindow",
    "Pipeline",
    "Reducer",
    "Reduction",
    "SlidingWindow",
    "Strategy",
    "StrategyResult",
    "SummaryCompaction",
    "Threshold",
    "TokenWindow",
    "ToolOutputTruncation",
]
