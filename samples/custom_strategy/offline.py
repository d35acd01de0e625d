"""Stands in for a model, so that the sample runs without a key and without a network.

It refuses every request beyond its window, as a provider would.
"""

from google.adk.models.llm_request import LlmRequest

from contextguard_adk.testing import Reply, SimulatedLlm, call

WINDOW_TOKENS = 8_000
MARKETS = ("Zurich", "Tokyo", "Lisbon")


def offline_model() -> SimulatedLlm:
    """Returns a model that fetches quotes, whatever it is asked."""
    return SimulatedLlm(context_window=WINDOW_TOKENS, script=watch, keep_requests=0)


def watch(request: LlmRequest) -> Reply:
    """Calls the tool, then answers from its result."""
    parts = request.contents[-1].parts or []
    for part in parts:
        if part.function_response:
            quotes = (part.function_response.response or {}).get("quotes") or ["none"]
            return f"{len(quotes)} quotes; the first is {quotes[0]}."
    # The guard's summary may stand before the user's newest words.
    texts = [part.text for part in parts if part.text]
    words = texts[-1].splitlines()[-1] if texts else ""
    named = [market for market in MARKETS if market in words]
    return call("get_quotes", market=named[0] if named else "Lisbon")
