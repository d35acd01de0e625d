"""The strategies that ship with the package."""

from contextguard_adk.strategies.base import Strategy as Strategy
from contextguard_adk.strategies.base import Threshold as Threshold
from contextguard_adk.strategies.pipeline import Pipeline as Pipeline
from contextguard_adk.strategies.pipeline import Reduction as Reduction
from contextguard_adk.strategies.reducers import MessageWindow as MessageWindow
from contextguard_adk.strategies.reducers import Reducer as Reducer
from contextguard_adk.strategies.reducers import StrategyResult as StrategyResult
from contextguard_adk.strategies.reducers import SummaryCompaction as SummaryCompaction
from contextguard_adk.strategies.reducers import TokenWindow as TokenWindow
from contextguard_adk.strategies.reducers import (
    ToolOutputTruncation as ToolOutputTruncation,
)
from contextguard_adk.strategies.sliding_window import SlidingWindow as SlidingWindow
