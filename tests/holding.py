"""What a plugin holds in memory."""

from __future__ import annotations

import gc
import types as python_types

from contextguard_adk import ContextGuardPlugin

NOT_OURS = (type, python_types.ModuleType, python_types.FunctionType)


def holds(plugin: ContextGuardPlugin, text: str) -> bool:
    """Whether a text is in anything that a plugin holds."""
    gc.collect()
    seen = set[int]()
    waiting = list[object]([plugin])

    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, NOT_OURS):
            continue
        seen.add(id(found))
        if isinstance(found, str) and text in found:
            return True
        waiting.extend(gc.get_referents(found))

    return False
