"""The strategies that ship with the package, and what authors of others need."""

from contextguard_adk._history.stored import Draft as Draft
from contextguard_adk._summaries.ask import Ask as Ask
from contextguard_adk._turn.turn import Turn as Turn
from contextguard_adk._turn.units import Section as Section
from contextguard_adk._turn.units import Shape as Shape
from contextguard_adk.strategies.base import Strategy as Strategy
from contextguard_adk.strategies.base import Threshold as Threshold
from contextguard_adk.strategies.pipeline import Pipeline as Pipeline
from contextguard_adk.strategies.reducers import ClearToolResults as ClearToolResults
from contextguard_adk.strategies.reducers import MessageWindow as MessageWindow
from contextguard_adk.strategies.reducers import Reducer as Reducer
from contextguard_adk.strategies.reducers import SummaryCompaction as SummaryCompaction
from contextguard_adk.strategies.reducers import TokenWindow as TokenWindow
from contextguard_adk.strategies.reducers import (
    ToolOutputTruncation as ToolOutputTruncation,
)
from contextguard_adk.strategies.reduction import Reduction as Reduction
from contextguard_adk.strategies.reduction import StrategyResult as StrategyResult
from contextguard_adk.strategies.sliding_window import SlidingWindow as SlidingWindow
