"""Settings that change while the guard runs: on demand, and when their file changes."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import InMemorySessionService

from contextguard_adk import (
    CompactionRecord,
    ContextGuardError,
    ContextGuardPlugin,
    Pipeline,
    Threshold,
)
from contextguard_adk._plugin import reloading
from contextguard_adk._plugin.sources import read_version
from contextguard_adk.config import PluginSettings, load_settings
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.background import Writer, in_virtual_time
from tests.builders import Chat, answer_text, call_part, guarded_agent, model, user
from tests.chats import agent_requests, words
from tests.guarded import is_compacted

SMALL = "[default]\ncontext_window = 4_000\nrecall = false\n"
LARGE = "[default]\ncontext_window = 400_000\n"
BROKEN = "[default]\ncontext_window = 'small'\n"
OBSERVING = f"observe = true\n{SMALL}"
WATCHED = "reload_on_change = true\n"
LOGGER = "contextguard_adk.plugin"


class Guarded:
    """A guard with a settings file, and sessions of one agent."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.write(text)
        self.told = list[CompactionRecord]()
        self.llm = SimulatedLlm(
            context_window=100_000,
            token_ratio=1.0,
            summary_replies=lambda _: "A summary.",
        )
        self.agent = guarded_agent(self.llm)
        self.plugin = ContextGuardPlugin.from_file(path, on_compaction=self.told.append)
        self.sessions = InMemorySessionService()

    def write(self, text: str) -> None:
        """Writes the settings, with a time that no version before has had."""
        earlier = self.path.stat().st_mtime if self.path.exists() else 1_000_000_000
        self.path.write_text(text)
        os.utime(self.path, (earlier + 1, earlier + 1))

    def open(self, name: str = "session") -> Chat:
        """A session."""
        return Chat(
            self.agent,
            [self.plugin],
            session_id=name,
            session_service=self.sessions,
        )

    def use(self, text: str) -> None:
        """Writes the settings, and has them read."""
        self.write(text)
        assert self.plugin.reload()

    def is_newest_compacted(self) -> bool:
        """Whether the newest request of the agent begins with a summary."""
        return is_compacted(agent_requests(self.llm)[-1])


@pytest.fixture
def guarded(tmp_path: Path) -> Guarded:
    """A guard with a window of 4,000 tokens."""
    return Guarded(tmp_path / "guard.toml", SMALL)


async def grow(chat: Chat, message: str = "Go on.") -> None:
    """A turn after an answer that fills the small window."""
    await chat.tell([user("The task."), model(words(3_300, "ORIGINAL"))])
    assert answer_text(await chat.say(message))


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """The lines of the log on settings that were read again."""
    lines = [record for record in caplog.records if record.name == LOGGER]
    return [
        record.getMessage()
        for record in lines
        if record.levelno == level and "guard.toml" in record.getMessage()
    ]


async def test_every_kind_of_setting_holds_from_the_next_call(guarded: Guarded) -> None:
    """Whether to act, whether to pay, when, how, and for which agents."""
    chat = guarded.open()
    guarded.use(OBSERVING)
    await grow(chat)
    assert not guarded.is_newest_compacted()

    guarded.use(LARGE)
    await chat.say("And on.")
    assert not guarded.is_newest_compacted()

    guarded.use(f'summaries = "stored"\n{SMALL}')
    await chat.say("And on.")
    assert guarded.is_newest_compacted()
    assert [record.failure for record in guarded.told] == ["not_asked"]
    assert guarded.llm.summaries == 0

    guarded.use(SMALL)
    await grow(chat)
    await chat.say("And on.")
    assert (guarded.llm.summaries, guarded.told[-1].strategy) == (1, "Threshold")

    guarded.use(f'{SMALL}strategy = "sliding_window"\n')
    await grow(chat)
    await chat.say("And on.")
    assert guarded.told[-1].strategy == "SlidingWindow"

    count = len(guarded.told)
    guarded.use(f'{SMALL}[agents]\nagent = "none"\n')
    await grow(chat)
    assert len(guarded.told) == count
    assert "ORIGINAL" in agent_requests(guarded.llm)[-1].text


async def test_sessions_stay_compacted(guarded: Guarded) -> None:
    """No summary is paid for again, and their beginnings stay as they are."""
    chats = [guarded.open(name) for name in ("a", "b", "c")]
    for chat in chats:
        await grow(chat)
    heads = [request.contents[0] for request in agent_requests(guarded.llm)]
    assert guarded.llm.summaries == len(chats)

    guarded.use(f"usage_in_state = false\n{SMALL}keep = 0\n")
    for chat in chats:
        await chat.say("And on.")
    newest = agent_requests(guarded.llm)[len(chats) :]
    assert [request.contents[0] for request in newest] == heads
    assert guarded.llm.summaries == len(chats)


async def test_a_summary_in_the_background_is_used(guarded: Guarded) -> None:
    """It was begun with the settings before, and is not paid for again."""
    writer = Writer()
    guarded.llm.summary_replies = writer.write
    ahead = "[default]\ncontext_window = 10_000\nahead = 0.75\nrecall = false\n"
    guarded.use(ahead)
    chat = guarded.open()
    await chat.tell([user("The task."), model(words(6_300, "ORIGINAL"))])
    await chat.say("Go on.")
    await writer.has_begun.wait()

    guarded.use(f"{ahead}keep = 0\n")
    await writer.end()
    await chat.say(words(2_500))
    assert guarded.is_newest_compacted()
    assert [record.was_ahead for record in guarded.told] == [True]
    assert writer.begun == 1


async def test_a_turn_under_way_goes_on(guarded: Guarded) -> None:
    """The settings change while its model and its summarizer are at work."""
    texts = [OBSERVING, f'{SMALL}[agents]\nagent = "none"\n', SMALL]

    async def write(request: LlmRequest) -> Reply:
        guarded.use(texts[0])
        return "A summary."

    async def act(request: LlmRequest) -> Reply:
        guarded.use(texts[len(agent_requests(guarded.llm)) % len(texts)])
        return "Done."

    guarded.llm.summary_replies = write
    guarded.llm.script = act
    chat = guarded.open()
    for _ in range(4):
        await grow(chat)
    assert guarded.llm.summaries
    assert guarded.told


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BROKEN, "default.context_window = 'small': "),
        ("observe = ", "Invalid value"),
        ("obsereve = true", "obsereve = True: unknown key. Did you mean 'observe'?"),
        (None, "cannot be read: "),
    ],
    ids=["value", "half written", "key", "missing"],
)
async def test_a_wrong_file_changes_nothing(
    guarded: Guarded, text: str | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line at ERROR names file, key and value; the old settings hold."""
    if text is None:
        guarded.path.unlink()
    else:
        guarded.write(text)
    assert guarded.plugin.reload() is False
    [line] = said(caplog, logging.ERROR)
    assert line.startswith(f"{guarded.path}: {why}")
    assert line.endswith("The settings stay as they are.")

    await grow(guarded.open())
    assert guarded.is_newest_compacted()


def test_the_log_names_what_has_changed(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    """Settings and agents by their names, without their values."""
    caplog.set_level(logging.INFO, LOGGER)
    guarded.use(f"{SMALL}[agents.writer]\nkeep = 100\n[agents.old]\n")
    text = "warning_threshold = 0.5\n[default]\nstrategy = 'pipeline'\n"
    guarded.use(f"{text}[agents.writer]\nkeep = 200\nsummary_instruction = 'xyzzy'\n")
    guarded.use(f"{text}[agents.writer]\nkeep = 200\nsummary_instruction = 'xyzzy'\n")

    start = f"Settings read again from {guarded.path}; changed: "
    writer = "agents.writer.keep, agents.writer.summary_instruction"
    assert said(caplog, logging.INFO) == [
        f"{start}agents.old, agents.writer.",
        f"{start}warning_threshold, default, agents.old, {writer}.",
        f"{start}nothing.",
    ]
    assert isinstance(guarded.plugin.settings.default, Pipeline)
    assert guarded.plugin.settings.warning_threshold == 0.5


@pytest.mark.parametrize("arguments", [{}, {"default": Threshold()}])
def test_without_a_file_there_is_nothing_to_read(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where settings in code go before the file in the environment."""
    if arguments:
        monkeypatch.setenv("CONTEXTGUARD_CONFIG", "guard.toml")
    with pytest.raises(ContextGuardError, match="no settings file"):
        ContextGuardPlugin(**arguments).reload()
    with pytest.raises(TypeError, match="reload_on_change"):
        ContextGuardPlugin(reload_on_change=True)  # type: ignore[call-arg]


def test_a_file_of_the_environment_that_was_wrong_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is mended, it is read; the working directory may be another one."""
    path = tmp_path / "guard.toml"
    path.write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONTEXTGUARD_CONFIG", "guard.toml")
    plugin = ContextGuardPlugin()
    monkeypatch.chdir(tmp_path.parent)
    assert plugin.settings.default == Threshold()

    path.write_text(SMALL)
    assert plugin.reload()
    assert plugin.settings.default == Threshold(context_window=4_000, recall=False)


def in_thread(reload: Callable[[], bool]) -> None:
    """Reloads in another thread."""
    thread = threading.Thread(target=reload)
    thread.start()
    thread.join()


def in_signal_handler(reload: Callable[[], bool]) -> None:
    """Reloads in a signal handler."""
    before = signal.signal(signal.SIGUSR1, lambda *_: reload())
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("call", [in_thread, in_signal_handler])
async def test_it_may_be_called_from_anywhere(
    guarded: Guarded, call: Callable[[Callable[[], bool]], None]
) -> None:
    """From a thread or a signal handler, between two calls."""
    guarded.use(OBSERVING)
    chat = guarded.open()
    await grow(chat)
    guarded.write(SMALL)
    call(guarded.plugin.reload)
    await chat.say("And on.")
    assert guarded.is_newest_compacted()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
async def test_a_copy_reads_the_file_too(
    tmp_path: Path, duplicate: Callable[[ContextGuardPlugin], Any]
) -> None:
    """On demand; where it is watched, also what changed before the copy was used."""
    path = tmp_path / "guard.toml"
    path.write_text(f"{WATCHED}{OBSERVING}")
    original = ContextGuardPlugin.from_file(path)
    path.write_text(f"{WATCHED}{SMALL}")
    os.utime(path, (1_000_000_000, 1_000_000_000))
    made = duplicate(original)
    plugin = pickle.loads(made) if isinstance(made, bytes) else made
    assert plugin.settings.observe

    llm = SimulatedLlm(summary_replies=lambda _: "A summary.")
    await grow(Chat(guarded_agent(llm), [plugin]))
    assert is_compacted(agent_requests(llm)[-1])
    path.write_text(OBSERVING)
    assert plugin.reload()
    assert plugin.settings.observe


@in_virtual_time
async def test_a_watched_file_is_read_after_a_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At a call, 30 seconds after the last look."""
    caplog.set_level(logging.INFO, LOGGER)
    guarded = Guarded(tmp_path / "guard.toml", f"{WATCHED}{OBSERVING}")
    chat = guarded.open()
    await grow(chat)
    guarded.write(f"{WATCHED}{SMALL}")
    await asyncio.sleep(29)
    await chat.say("And on.")
    assert not guarded.is_newest_compacted()
    await asyncio.sleep(2)
    await chat.say("And on.")
    assert guarded.is_newest_compacted()

    await asyncio.sleep(31)
    await chat.say("And on.")
    assert len(said(caplog, logging.INFO)) == 1

    guarded.write(OBSERVING)
    await asyncio.sleep(31)
    await chat.say("And on.")
    assert guarded.plugin.settings.observe
    # A file that was watched stays so: perhaps only a part of it was written yet.
    guarded.write(SMALL)
    await asyncio.sleep(31)
    await chat.say("And on.")
    assert not guarded.plugin.settings.observe


@in_virtual_time
async def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """Until it has not changed for two seconds; each call looks at it meanwhile."""
    guarded = Guarded(tmp_path / "guard.toml", f"{WATCHED}{OBSERVING}")
    chat = guarded.open()
    await chat.say("Hello.")
    guarded.path.write_text(WATCHED)  # Only a part of it, just now.
    for _ in range(2):
        await asyncio.sleep(31)
        await chat.say("And on.")
        assert guarded.plugin.settings.observe

    guarded.path.write_text(f"{WATCHED}{SMALL}")
    two_seconds_ago = time.time() - 2
    os.utime(guarded.path, (two_seconds_ago, two_seconds_ago))
    await chat.say("And on.")
    assert not guarded.plugin.settings.observe


@in_virtual_time
async def test_a_watched_file_that_is_wrong_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each wrong version is logged once, and the next right one is used."""
    guarded = Guarded(tmp_path / "guard.toml", f"{WATCHED}{SMALL}")
    chat = guarded.open()
    await chat.say("Hello.")

    async def look(times: int = 3) -> int:
        """Lets calls look at the file; returns how many errors were logged so far."""
        for _ in range(times):
            await asyncio.sleep(31)
            await chat.say("And on.")
        return len(said(caplog, logging.ERROR))

    guarded.write("observe = tr")
    assert await look() == 1
    guarded.write(f"{WATCHED}{BROKEN}")
    assert await look() == 2
    guarded.path.unlink()
    assert await look() == 3
    assert guarded.plugin.settings.default == Threshold(
        context_window=4_000, recall=False
    )
    guarded.write(f"{WATCHED}{LARGE}")
    assert await look(1) == 3
    assert guarded.plugin.settings.default == Threshold(context_window=400_000)


@in_virtual_time
async def test_a_link_to_another_file_is_a_change(tmp_path: Path) -> None:
    """As where Kubernetes mounts a ConfigMap: the link to the folder is replaced."""
    for name, text in {"one": OBSERVING, "two": SMALL}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "guard.toml").write_text(f"{WATCHED}{text}")
        os.utime(tmp_path / name / "guard.toml", (1_000_000_000, 1_000_000_000))
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "guard.toml").symlink_to(Path("data") / "guard.toml")
    plugin = ContextGuardPlugin.from_file(tmp_path / "guard.toml")
    assert plugin.settings.observe

    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").replace(tmp_path / "data")
    await Chat(guarded_agent(SimulatedLlm()), [plugin]).say("Hello.")
    assert not plugin.settings.observe


@in_virtual_time
async def test_calls_at_the_same_time_read_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In all sessions together."""
    caplog.set_level(logging.INFO, LOGGER)
    guarded = Guarded(tmp_path / "guard.toml", f"{WATCHED}{OBSERVING}")
    chats = [guarded.open(str(number)) for number in range(8)]
    guarded.write(f"{WATCHED}{SMALL}")
    await asyncio.gather(*(chat.say("Hello.") for chat in chats))
    assert len(said(caplog, logging.INFO)) == 1


@in_virtual_time
async def test_a_change_within_a_run_holds_for_its_next_call(tmp_path: Path) -> None:
    """The calls of a long run look at the file as those of other turns do."""
    guarded = Guarded(tmp_path / "guard.toml", f"{WATCHED}{OBSERVING}")

    async def act(request: LlmRequest) -> Reply:
        if len(agent_requests(guarded.llm)) > 1:
            return "Done."
        guarded.write(f"{WATCHED}{SMALL}")
        await asyncio.sleep(31)
        return call_part("look")

    def look() -> str:
        """Looks."""
        return "Nothing."

    guarded.llm.script = act
    guarded.agent = guarded_agent(guarded.llm, [look])
    await grow(guarded.open())
    first, second = agent_requests(guarded.llm)
    assert (is_compacted(first), is_compacted(second)) == (False, True)


async def test_a_file_that_hangs_ends_no_turn(tmp_path: Path) -> None:
    """As on a network drive that is gone: a call waits two seconds, and goes on."""
    guarded = Guarded(tmp_path / "guard.toml", f"{WATCHED}{SMALL}")
    guarded.path.unlink()
    os.mkfifo(guarded.path)  # Reading waits for a writer.
    os.utime(guarded.path, (1_000_000_000, 1_000_000_000))
    async with asyncio.timeout(60):
        await grow(guarded.open())
    assert guarded.is_newest_compacted()

    guarded.path.write_text(f"{WATCHED}{OBSERVING}")


async def test_a_listener_has_the_new_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And not the one that the guard began with."""

    async def wait(record: object) -> None:
        await asyncio.sleep(0.05)

    path = tmp_path / "guard.toml"
    path.write_text(SMALL)
    plugin = ContextGuardPlugin.from_file(path, on_call=wait)
    chat = Chat(guarded_agent(SimulatedLlm()), [plugin])
    await chat.say("One.")
    assert "takes longer" not in caplog.text

    path.write_text(f"listener_timeout_seconds = 0.01\n{SMALL}")
    assert plugin.reload()
    await chat.say("Two.")
    assert "takes longer than 0.01 seconds" in caplog.text


def test_a_file_of_the_same_size_and_time_is_another_one(tmp_path: Path) -> None:
    """A deployment may put a file in place by renaming, with its old time."""
    path = tmp_path / "guard.toml"
    path.write_text("a")
    version = read_version(str(path))
    other = tmp_path / "other.toml"
    other.write_text("b")
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)
    assert read_version(str(path)) != version


def test_reading_may_be_interrupted_by_another_reading(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a signal handler; the newer settings stay in place."""
    is_interrupted = False

    def load(path: str) -> PluginSettings:
        nonlocal is_interrupted
        settings = load_settings(path)
        if not is_interrupted:
            is_interrupted = True
            guarded.use(OBSERVING)
        return settings

    monkeypatch.setattr(reloading, "load_settings", load)
    reader = threading.Thread(target=guarded.plugin.reload, daemon=True)
    reader.start()
    reader.join(timeout=20)
    assert not reader.is_alive()
    assert guarded.plugin.settings.observe
