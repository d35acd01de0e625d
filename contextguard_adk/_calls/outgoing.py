"""The last steps before a request leaves, the same in a recovery."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from google.genai import types

from contextguard_adk._calls.refusals import apply_answers
from contextguard_adk._history.thoughts import (
    SealedRequest,
    Thinker,
    leave_out_thoughts,
    show_omitted,
)
from contextguard_adk._summarizing.items import leave_out_media
from contextguard_adk.telemetry import warn_once

if TYPE_CHECKING:
    from google.adk.events.event import Event

    from contextguard_adk._calls.limits import Limits
    from contextguard_adk._measuring.tokens import Memo

logger = logging.getLogger("contextguard_adk.thoughts")


class Outgoing:
    """Gives the contents of one call the form that its provider accepts."""

    def __init__(self, limits: Limits, events: Sequence[Event], memo: Memo) -> None:
        self._limits = limits
        self._events = events
        self._memo = memo
        self.sealed: SealedRequest | None = None

    @property
    def answers(self) -> dict[str, str]:
        """What helped where the provider refused a history of this session."""
        return self._limits.state.record.refused or {}

    @property
    def thinker(self) -> Thinker:
        """The model, as far as its thoughts are concerned."""
        limits, known = self._limits, self.answers
        binds = limits.strategy.binds_thoughts
        if binds is None and limits.model in (known.get("binds"), known.get("free")):
            binds = limits.model == known.get("binds")
        return Thinker.of(limits.llm, limits.model, binds)

    def shape(
        self, contents: list[types.Content], is_changed: bool = True
    ) -> list[types.Content]:
        """Returns the contents to send; `is_changed` where the guard changed them."""
        limits, thinker, known = self._limits, self.thinker, self.answers
        contents = leave_out_media(contents, limits.session.max_media_bytes)
        contents = apply_answers(contents, known, thinker.wants_signatures)
        sealed = SealedRequest(thinker, contents, memo=self._memo)
        self.sealed = sealed = leave_out_thoughts(
            sealed,
            limits.request.config,
            self._events,
            known.get("gone", ""),
            is_changed,
        )
        return show_omitted(sealed.contents, thinker.client)

    def watch(self) -> None:
        """Warns once of what others change on every call: it costs all thoughts."""
        session, sealed = self._limits.session, self.sealed
        if sealed is None or not sealed.changed:
            return
        session.changed_count += 1
        if session.changed_count == 2:
            message = (
                "Agent %r: %s changed between its calls, so that its model's thoughts "
                "before that cannot be sent again. Keep what changes on every call "
                "out of the instruction, the tools and older messages."
            )
            warn_once(logger, message, self._limits.agent, sealed.changed)
