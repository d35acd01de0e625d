"""Draws a replay: tokens, threshold and window over the calls, compactions marked."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contextguard_adk.tools.recordings import RecordingError
from contextguard_adk.tools.replayed import Replayed, ReplayedCall

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png", ".pdf")

_WIDTH_INCHES = 9.0
_HEIGHT_INCHES = 3.6


def require_plotting(path: Path) -> None:
    """Fails before the work does.

    Raises:
        RecordingError: matplotlib is missing, or the file cannot be one.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise RecordingError(
            "--plot needs the extra: pip install 'contextguard-adk[plot]'"
        )
    if path.suffix.lower() not in FORMATS:
        raise RecordingError(f"{path}: the name must end in {', '.join(FORMATS)}")


def save_plot(replayed: Replayed, path: Path) -> None:
    """Writes the drawing, one panel for each agent.

    Raises:
        RecordingError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    agents = list(dict.fromkeys(call.agent for call in replayed.calls))
    figure = Figure(
        figsize=(_WIDTH_INCHES, _HEIGHT_INCHES * len(agents)), layout="constrained"
    )
    panels = figure.subplots(len(agents), squeeze=False)
    for agent, axes in zip(agents, panels[:, 0], strict=True):
        _draw(axes, agent, [call for call in replayed.calls if call.agent == agent])
    try:
        figure.savefig(path)
    except OSError as error:
        raise RecordingError(
            f"{path}: cannot be written: {error.strerror or type(error).__name__}"
        ) from error


def _draw(axes: Axes, agent: str, calls: Sequence[ReplayedCall]) -> None:
    numbers = [call.number for call in calls]
    axes.plot(
        numbers,
        [call.whole_tokens for call in calls],
        color="#999999",
        label="without the guard",
    )
    axes.plot(
        numbers,
        [call.sent_tokens for call in calls],
        color="#1f77b4",
        label="with the guard",
    )
    guarded = [call for call in calls if call.window_tokens and call.threshold_tokens]
    for name, color, values in (
        ("threshold", "#ff7f0e", [call.threshold_tokens or 0 for call in guarded]),
        ("window", "#d62728", [call.window_tokens or 0 for call in guarded]),
    ):
        axes.plot(
            [call.number for call in guarded],
            values,
            color=color,
            linestyle="--",
            linewidth=1,
            label=name,
        )
    compacted = [call for call in calls if call.compaction]
    axes.plot(
        [call.number for call in compacted],
        [call.sent_tokens for call in compacted],
        color="#1f77b4",
        marker="v",
        linestyle="none",
        label="compaction",
    )
    axes.set_title(agent, loc="left", fontsize=10)
    axes.set_xlabel("model call")
    axes.set_ylabel("prompt tokens")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(fontsize=8, loc="upper left")
