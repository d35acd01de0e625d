"""Warns where the setting `keep_tools` cannot do what it says."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from contextguard_adk._core.call import Call
from contextguard_adk._history.contents import (
    has_result_of,
    parts_of,
    results_of,
)
from contextguard_adk._runtime.adk_tree import AppTools
from contextguard_adk._support.log import warn_once
from contextguard_adk._support.settings import MIN_SIMILARITY, suggest
from contextguard_adk._turn.turn import Turn

logger = logging.getLogger("contextguard_adk.call")


def warn_of_previews(turn: Turn) -> None:
    """Warns of results of `keep_tools` that are too large to be shown whole."""
    tools = turn.settings.keep_tools
    if not tools:
        return
    for index, preview in turn.history.shown_in_part.items():
        content = turn.history.contents[index]
        is_whole = has_result_of(content, tools, preview)
        if not is_whole and has_result_of(content, tools):
            _warn_of_size(turn, index)


def warn_of_compaction(call: Call, turn: Turn, covered: frozenset[int]) -> None:
    """Warns of results of `keep_tools` that a compaction does not leave whole.

    Also warns of names in `keep_tools` that are no tools.

    Args:
        call: The model call.
        turn: The same call as a value, before the summary is in its request.
        covered: The indexes of the messages that the summary replaces.
    """
    tools = turn.settings.keep_tools
    if not tools:
        return

    newest = frozenset(turn.newest_results.values())
    # `keep_tools` does not hold for results that a model has summarized before.
    new_indexes = frozenset(turn.history.indexes) - turn.history.model_covered
    for index in sorted(newest & new_indexes - turn.always_kept):
        _warn_of_size(turn, index)

    contents = turn.history.contents
    older = covered - newest - turn.history.model_covered
    if any(has_result_of(contents[index], tools) for index in older):
        message = (
            "Results of `keep_tools` take more than a tenth of the window of agent %r, "
            "with what was called beside them; older ones go."
        )
        warn_once(logger, message, turn.agent)
    _warn_of_names(call, tools)


def _warn_of_size(turn: Turn, index: int) -> None:
    """Warns once a session that a result of `keep_tools` has no room.

    Args:
        turn: The model call.
        index: The index of the message with the result.
    """
    group = sorted(turn.history.pairs.group_of(index) | {index})
    contents = [turn.history.contents[each] for each in group]
    result_tokens = turn.measure_alone(contents)

    message = (
        "`keep_tools` cannot keep a result of %s word for word: with its call "
        "it takes %s tokens, and there is room for %s beside instruction, tools, the "
        "user's request and a summary. Let the tool return less, shorten instruction "
        "and tools, or use a larger context window."
    )
    origin = turn.origin
    for tool in _kept_tools_of(turn, index):
        about = f"{tool!r} of agent {turn.agent!r} in session {origin.session_id!r}"
        room_tokens = turn.kept_tools_room_tokens
        warn_once(logger, message, about, f"{result_tokens:,}", f"{room_tokens:,}")


def _kept_tools_of(turn: Turn, index: int) -> list[str]:
    """Returns the names in `keep_tools` that have a result in a message."""
    results = [part.function_response for part in results_of(turn.messages[index])]
    names = {result.name for result in results if result and result.name}
    return sorted(names.intersection(turn.settings.keep_tools))


def _warn_of_names(call: Call, kept_tools: Sequence[str]) -> None:
    """Warns of each name in `keep_tools` that no tool of the app has.

    A toolset learns the names of its tools later, and other apps may have the same
    settings. So if not all tools are known, only misspelled names are warned of.
    """
    app = call.origin.app
    app_tools = call.guard.app_tools.get(app, AppTools())
    known_names = {*app_tools.names, *call.request.tools_dict, *_called_tools(call)}
    # If a name is misspelled, the tool that was meant has a similar name, and is not
    # in the setting.
    possibly_meant = known_names.difference(kept_tools)

    for name in sorted(set(kept_tools) - known_names):
        similar_names = get_close_matches(
            name, possibly_meant, n=1, cutoff=MIN_SIMILARITY
        )
        if not (app_tools.are_all_known or similar_names):
            continue
        warn_once(
            logger,
            "`keep_tools` names %r, but app %r has no tool of that name.%s",
            name,
            app,
            suggest(name, possibly_meant),
        )


def _called_tools(call: Call) -> Iterator[str]:
    """Yields the names of the tools that were called in the session."""
    for event in call.invocation.session.events:
        for part in parts_of(event.content):
            if part.function_call and part.function_call.name:
                yield part.function_call.name
