"""Listeners and what the log says."""

from __future__ import annotations

import logging
from dataclasses import FrozenInstanceError

import pytest

from contextguard_adk.telemetry import (
    CompactionRecord,
    PressureRecord,
    log_compaction,
    log_pressure,
    notify,
)

PRESSURE = PressureRecord(
    agent="agent",
    session_id="session",
    tokens=80,
    window_tokens=100,
    pressure_before=0.9,
    pressure=0.8,
    warning_threshold=0.7,
)
COMPACTION = CompactionRecord(
    agent="agent",
    session_id="session",
    strategy="Threshold",
    reason="tokens",
    tokens_before=90,
    tokens_after=20,
    contents_before=9,
    contents_after=2,
    summary_tokens=10,
    duration_seconds=0.1,
    attempts=1,
    is_mechanical=False,
)


async def test_a_listener_may_be_sync_or_async() -> None:
    """Either form gets the record; an async one is awaited."""
    told: list[PressureRecord] = []

    async def listen(record: PressureRecord) -> None:
        told.append(record)

    await notify(told.append, PRESSURE)
    await notify(listen, PRESSURE)
    await notify(None, PRESSURE)
    assert told == [PRESSURE, PRESSURE]


async def test_a_failing_listener_is_logged_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A user's own code may fail; what it says may quote messages."""

    def listen(record: PressureRecord) -> None:
        raise RuntimeError("secret")

    async def listen_async(record: PressureRecord) -> None:
        raise KeyError("secret")

    await notify(listen, PRESSURE)
    await notify(listen_async, PRESSURE)
    assert [record.getMessage() for record in caplog.records] == [
        "A listener for PressureRecord failed: RuntimeError.",
        "A listener for PressureRecord failed: KeyError.",
    ]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("record", "field"), [(PRESSURE, "tokens"), (COMPACTION, "attempts")]
)
def test_records_are_frozen(record: object, field: str) -> None:
    """A listener cannot change what the next one sees."""
    with pytest.raises(FrozenInstanceError):
        setattr(record, field, 1)


def test_the_log_has_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """Compactions are information, pressure is a warning."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    log_compaction(COMPACTION, 85)
    log_pressure(PRESSURE)
    compacted, pressed = caplog.records
    assert compacted.levelno == logging.INFO
    assert "90 to 20 tokens, 9 to 2 contents, threshold 85" in compacted.getMessage()
    assert pressed.levelno == logging.WARNING
    assert "80 of 100 tokens (80 %)" in pressed.getMessage()
