"""Writes a page with all that it needs: it loads nothing from anywhere.

All that comes from a session is untrusted: it reaches the page as escaped text or as
JSON, and its Content-Security-Policy lets nothing run but the two scripts of ours.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from contextguard_adk._tools.recordings import read_number
from contextguard_adk._tools.terminal import explain_writing
from contextguard_adk.records import format_cost

LIBRARY = "vendor/chart.umd.min.js"


def write_page(output: Path, name: str, **values: Any) -> None:
    """Writes a page, which loads nothing from anywhere."""
    folder = files("contextguard_adk") / "_tools"
    names = f"page/{name}", "page/report.css", "page/report.js", LIBRARY
    template, style, script, library = (
        (folder / path).read_text("utf-8") for path in names
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {}  # The facts keep their order.
    environment.filters.update(digest=_digest, cost=format_cost, number=read_number)
    values |= {"style": style, "script": script, "library": library}
    page = environment.from_string(template).render(values)
    with explain_writing(output):
        output.write_text(page, "utf-8", "replace")


def _digest(text: str) -> str:
    """Names a script or style in the policy."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
