"""Stands in for a model, so that the sample runs without a key and without a network.

It refuses every request beyond its window, as a provider would.
"""

import re
from typing import Any

from google.adk.models.llm_request import LlmRequest

from contextguard_adk.testing import Reply, SimulatedLlm, call

WINDOW_TOKENS = 8_000
NAMESPACES = ("staging", "monitoring", "production")


def offline_model() -> SimulatedLlm:
    """Returns a model that inspects the cluster, whatever it is asked."""
    return SimulatedLlm(
        context_window=WINDOW_TOKENS,
        script=operate,
        summary_replies=summarize,
        keep_requests=0,
    )


def operate(request: LlmRequest) -> Reply:
    """Calls the tool, then answers from its result."""
    parts = request.contents[-1].parts or []
    for part in parts:
        if part.function_response:
            return report(part.function_response.response or {})
    # The guard's summary may stand before the user's newest words.
    texts = [part.text for part in parts if part.text]
    words = texts[-1].splitlines()[-1] if texts else ""
    named = [name for name in NAMESPACES if name in words]
    return call("get_pods", namespace=named[0] if named else "production")


def report(result: dict[str, Any]) -> str:
    """Says which pods are down."""
    rows = str(result.get("pods")).splitlines()
    down = [row.split()[0] for row in rows if "CrashLoop" in row]
    return f"{len(down)} pods are down: {', '.join(down)}. All others are running."


def summarize(request: LlmRequest) -> str:
    """Writes a summary from what the transcript, and a summary before it, say."""
    text = "\n".join(part.text or "" for part in request.contents[-1].parts or [])
    found = re.findall(r'(?m)^user:\n  (.+)$|^- The user asked: "(.+)"$', text)
    asked = list(dict.fromkeys(new or known for new, known in found))
    reports = re.findall(r"pods are down: ([^.\n]+)\.", text)
    down = sorted({pod for report in reports for pod in report.split(", ")})
    facts = []
    for namespace in sorted({pod.split("-")[0] for pod in down}):
        pods = [pod for pod in down if pod.startswith(namespace)]
        named = f"{len(pods)} pods are down: {', '.join(pods)}."
        facts.append(f"- {namespace}: {named} All others are running.")
    return "\n".join(
        [
            "## Done",
            f"The cluster was inspected; {len(down)} pods are down in all.",
            "\n## Key Information",
            *facts,
            "\n## Constraints",
            *(f'- The user asked: "{message}"' for message in asked[-4:]),
            "\n## Decisions & Next Steps",
            "Inspect the cluster before the next answer.",
            "\n## Language and Tools",
            "English; `get_pods`.",
        ]
    )
