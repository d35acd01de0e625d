"""Requests that still fill much of the window after compaction had its turn."""

from __future__ import annotations

from contextguard_adk.memory import Memory, SessionKey
from contextguard_adk.summarizing.context import CompactionContext
from contextguard_adk.telemetry import Observers, PressureRecord, report_pressure


class Pressure:
    """Watches the pressure of one agent in one session.

    Args:
        memory: Where is remembered whether the last request was under pressure.
        session_key: The agent and the session.
        session_id: The session, for the record.
        observers: Who is told, and from which pressure on.
    """

    def __init__(
        self,
        memory: Memory,
        session_key: SessionKey,
        session_id: str,
        observers: Observers,
    ) -> None:
        self._memory = memory
        self._session_key = session_key
        self._session_id = session_id
        self._observers = observers

    async def watch(
        self, context: CompactionContext, tokens: int, is_final: bool
    ) -> None:
        """Reports once when what is sent still fills much of the window.

        Only where compaction had its turn, or never will have: on the way up to the
        threshold there is nothing to worry about.

        Args:
            context: What is known about the call.
            tokens: The estimate of what is sent.
            is_final: Whether compaction had its turn.
        """
        window = context.budgets.window_tokens
        warn_at = self._observers.warning_threshold
        pressure = tokens / window
        was_high = self._memory.pressed.get(self._session_key)
        if pressure < warn_at:
            if was_high:
                self._memory.pressed.pop(self._session_key)
            return
        if was_high or not is_final:
            return
        self._memory.pressed.put(self._session_key, True)
        record = PressureRecord(
            agent=context.agent,
            session_id=self._session_id,
            tokens=tokens,
            window_tokens=window,
            pressure_before=context.tokens / window,
            pressure=pressure,
            warning_threshold=warn_at,
        )
        await report_pressure(record, self._observers)
