"""Writes an HTML page that holds all it needs and loads nothing.

Everything from a session is untrusted. It reaches the page as escaped text or as JSON,
and the page's Content-Security-Policy allows only the two scripts of this package.
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


def write_page(output: Path, **values: Any) -> None:
    """Fills in the template of a report, and writes the page to a file.

    Args:
        output: The file to write.
        values: The variables of the template, but for its style and scripts.

    Raises:
        CommandError: The file cannot be written.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    # By default jinja sorts the keys of JSON. The page shows keys in their own order.
    environment.policies["json.dumps_kwargs"] = {}
    environment.filters.update(digest=_digest, cost=format_cost, number=read_number)

    template = environment.from_string(_read_file("page/report.html"))
    page = template.render(
        values,
        style=_read_file("page/report.css"),
        script=_read_file("page/report.js"),
        library=_read_file(LIBRARY),
    )
    with explain_writing(output):
        # A session may have characters that UTF-8 cannot encode. Each becomes "?".
        output.write_text(page, "utf-8", "replace")


def _read_file(path: str) -> str:
    return (files("contextguard_adk") / "_tools" / path).read_text("utf-8")


def _digest(text: str) -> str:
    """Returns the hash by which the page's policy allows a script or style."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
