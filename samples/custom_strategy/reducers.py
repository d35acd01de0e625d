"""A reducer of one's own: the results of chosen tools leave the request early."""

from contextguard_adk.strategies import Reducer, Reduction, StrategyResult


class ForgetResults(Reducer):
    """Drops old calls of chosen tools together with their results.

    Attributes:
        tools: Names of tools whose results are soon out of date.
        keep_count: How many of the newest such messages stay.
    """

    tools: frozenset[str]
    keep_count: int = 2

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Drops all but the newest calls and results of these tools."""
        contents = reduction.turn.messages
        stale = [
            index
            for index in reduction.kept
            if any(
                (named := part.function_call or part.function_response)
                and named.name in self.tools
                for part in contents[index].parts or []
            )
        ]
        return reduction.drop(stale[: max(0, len(stale) - self.keep_count)])
