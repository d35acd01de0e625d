"""The conversations that the guard is tried on, each about three context windows."""

from __future__ import annotations

import base64
import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from google.genai import types
from pydantic_core import to_json

from contextguard_adk.testing import provider as _simulated
from tests.builders import Conversation, ToolUse, Turn

LARGEST_BPE_WINDOW_TOKENS = 32_000
"""Up to here the provider counts by BPE; beyond that by bytes, which is faster."""

Kind = Literal["prose", "code", "json", "log", "base64", "cjk"]
KINDS: tuple[Kind, ...] = ("json", "code", "prose", "log", "base64", "cjk")

_STDLIB = "argparse ast difflib doctest inspect mailbox optparse pydoc tarfile typing"
_WORDS = (
    "the billing service nightly import staging cluster search index customer in Porto "
    "mobile release depends on disagrees with waits for OPS-4217 twice as many errors "
    "since Tuesday, whenever 5120 users report a delay of 340 ms. Nobody restarts it."
)
_CJK = (
    "部署在周二晚上失败了、因为第三个分片没有足够的磁盘空间。|"
    "请检查支付网关的日志、并告诉我哪些请求超时。\n|客户昨天确认了新的合同条款。|"
    "このサービスは毎晩データベースを更新します。|エラーの原因はまだ分かっていません。|"
    "회의는 내일 오전 열 시에 시작합니다.|재고 목록을 다시 확인해 주세요.\n"
)


@lru_cache(maxsize=8)
def _pool(kind: Kind) -> str:
    """A few hundred kilobytes of one kind of text, always the same."""
    rng = random.Random(kind)
    if kind == "code":
        paths = (Path(os.__file__).with_name(f"{name}.py") for name in _STDLIB.split())
        return "\n".join(path.read_text("utf-8") for path in paths)
    if kind == "base64":
        return base64.b64encode(rng.randbytes(300_000)).decode()
    if kind == "json":
        return "".join(to_json(_make_pod(rng)).decode() for _ in range(400))
    if kind == "cjk":
        return "".join(rng.choices(_CJK.split("|"), k=3_000))
    if kind == "prose":
        return " ".join(rng.choices(_WORDS.split(), k=60_000))
    return "".join(_log_line(rng) for _ in range(3_000))


def _log_line(rng: random.Random) -> str:
    level = rng.choice(("INFO", "INFO", "DEBUG", "WARN", "ERROR"))
    return (
        f"2026-02-{rng.randrange(1, 29):02}T{rng.randrange(24):02}:14:03."
        f"{rng.randrange(1000)}Z {level} worker[{rng.randrange(64)}] "
        f"GET /api/v2/orders/{rng.randrange(10**6)} {rng.choice((200, 200, 404, 503))} "
        f"{rng.randrange(3_000)}ms trace={rng.getrandbits(64):016x}\n"
    )


def _make_pod(rng: random.Random) -> dict[str, Any]:
    """One item of `kubectl get pods -o json`, shortened."""
    app = rng.choice(("checkout", "ledger", "search", "ingest", "mailer", "frontend"))
    name = f"{app}-{rng.getrandbits(40):010x}-{rng.getrandbits(20):05x}"
    image = f"registry.example.com/shop/{app}:1.{rng.randrange(40)}.{rng.randrange(9)}"
    labels = {"app": app, "pod-template-hash": name.split("-")[1]}
    port = {"containerPort": 8080, "protocol": "TCP"}

    return {
        "metadata": {
            "name": name,
            "uid": f"{rng.getrandbits(128):032x}",
            "labels": labels,
        },
        "spec": {
            "nodeName": f"ip-10-0-{rng.randrange(256)}-{rng.randrange(256)}.internal",
            "containers": [{"image": image, "ports": [port], "limits": {"cpu": "1"}}],
        },
        "status": {
            "phase": rng.choice(("Running", "Running", "Pending", "Failed")),
            "podIP": f"10.42.{rng.randrange(256)}.{rng.randrange(256)}",
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "5m0s"}},
            "imageID": f"{image}@sha256:{rng.getrandbits(256):064x}",
        },
    }


@lru_cache(maxsize=64)
def _chars_per_token(kind: Kind, token_ratio: float | None) -> float:
    sample = _pool(kind)[:60_000]
    return len(sample) / _simulated.count_tokens([sample], token_ratio)


class Writer:
    """Writes material of a wanted share of the window, seeded by its name."""

    def __init__(
        self, name: str, window_tokens: int, token_ratio: float | None
    ) -> None:
        self.window_tokens = window_tokens
        self.token_ratio = token_ratio
        self._rng = random.Random(f"{name}-{window_tokens}")
        self._numbers = itertools.count(1)

    def text(self, kind: Kind, share: float) -> str:
        """Text that takes about this share of the window."""
        chars = max(1, int(self._chars(kind, share)))
        pool = _pool(kind)
        start = self._rng.randrange(len(pool))
        repeated = pool * (1 + (start + chars) // len(pool))
        return repeated[start : start + chars]

    def _chars(self, kind: Kind, share: float) -> float:
        tokens = share * self.window_tokens
        return tokens * _chars_per_token(kind, self.token_ratio)

    def result(self, kind: Kind, share: float) -> Any:
        """A tool's result of about this share; JSON as an object, else a text."""
        if kind != "json":
            return self.text(kind, share)
        room_bytes = self._chars(kind, share)

        items: list[dict[str, Any]] = []
        while room_bytes > 0:
            pod = _make_pod(self._rng)
            size_bytes = len(to_json(pod))
            if size_bytes > room_bytes:
                pod = {"name": pod["metadata"]["name"], "status": pod["status"]}
                size_bytes = max(size_bytes, int(room_bytes))
            items.append(pod)
            room_bytes -= size_bytes

        if share * self.window_tokens < 300:
            return {"items": [item["status"]["podIP"] for item in items]}
        return {"apiVersion": "v1", "kind": "List", "items": items}

    def ask(self, share: float, opening: str = "") -> str:
        """A message of the user that no other message repeats."""
        number = next(self._numbers)
        return f"Request {number}. {opening}{self.text('prose', share)}".strip()

    def talk(self, asked: float, answered: float, kind: Kind = "prose") -> Turn:
        """A turn without tools."""
        return Turn(self.ask(asked), answer=self.text(kind, answered))

    def chain(self, steps: int, share: float, answered: float, first: int = 0) -> Turn:
        """A turn of calls one after the other, with results of all kinds in turn."""
        uses = []
        for step in range(first, first + steps):
            kind = KINDS[step % len(KINDS)]
            uses.append([ToolUse(f"fetch_{kind}", self.result(kind, share))])
        return Turn(self.ask(0.02), uses, self.text("prose", answered))

    def blob(self, mime_type: str, magic: bytes, size_bytes: int) -> types.Part:
        """An attachment."""
        data = magic + self._rng.randbytes(size_bytes)
        return types.Part(inline_data=types.Blob(mime_type=mime_type, data=data))


def normal_talk(writer: Writer) -> Conversation:
    """Questions and longer answers; every fourth one in another language."""
    kinds: tuple[Kind, ...] = ("prose", "prose", "code", "cjk")
    return Conversation([writer.talk(0.03, 0.15, kinds[i % 4]) for i in range(16)])


def tool_heavy(writer: Writer) -> Conversation:
    """Four tool calls one after the other in every turn."""
    turns = [writer.chain(4, 0.135, answered=0.02, first=turn) for turn in range(5)]
    return Conversation(turns)


def parallel_bursts(writer: Writer) -> Conversation:
    """Ten parallel calls at a time, twice in every turn."""
    turns = []
    for turn in range(4):
        results = [
            writer.result(KINDS[(turn + n) % 6], 0.033) for n in [*range(10)] * 2
        ]
        uses = [ToolUse("probe_host", result) for result in results]
        bursts = [uses[:10], uses[10:]]
        turns.append(Turn(writer.ask(0.02), bursts, writer.text("prose", 0.05)))

    return Conversation(turns)


def mixed(writer: Writer) -> Conversation:
    """Talk and tools in turn, with material of all kinds."""
    turns = []
    for turn in range(8):
        chain = writer.chain(2, 0.145, answered=0.06, first=2 * turn)
        turns.append(chain if turn % 4 else writer.talk(0.04, 0.2))
    return Conversation(turns)


def fifty_turns(writer: Writer) -> Conversation:
    """Many short turns."""
    return Conversation([writer.talk(0.018, 0.042) for _ in range(50)])


def only_tool_results(writer: Writer) -> Conversation:
    """One request, then nothing but tool calls and their results."""
    return Conversation([writer.chain(24, 0.115, answered=0.02)])


def rapid_short(writer: Writer) -> Conversation:
    """Short messages, often the very same ones."""
    words = ("yes", "yes", "go on", "ok", "and then?", "no", "继续", "yes")
    said = [words[turn % len(words)] for turn in range(30)]
    return Conversation([Turn(it, answer=writer.text("prose", 0.095)) for it in said])


def empty_results(writer: Writer) -> Conversation:
    """Tools that return nothing, in all its forms."""
    nothing: tuple[Any, ...] = ("", {}, None, [], {"result": ""}, 0)
    turns = []
    for turn in range(8):
        found = [ToolUse("find", nothing[turn % 6]), ToolUse("find", "")]
        cleaned = [ToolUse("clean_up", nothing[(turn + 3) % 6])]
        answer = writer.text("prose", 0.33)
        turns.append(Turn(writer.ask(0.03), [found, cleaned], answer))
    return Conversation(turns)


def media(writer: Writer) -> Conversation:
    """Images and documents in the user's messages."""
    media_tokens = 258 if writer.window_tokens < 32_000 else 1_100
    count = min(8, max(1, int(0.06 * writer.window_tokens / media_tokens)))

    turns = []
    for turn in range(12):
        parts = [types.Part(text=writer.ask(0.04))]
        if turn % 3 != 2:
            magic = b"\x89PNG\r\n\x1a\n"
            parts += [writer.blob("image/png", magic, 3_000) for _ in range(count)]
        if turn % 3 != 1:
            parts.append(writer.blob("application/pdf", b"%PDF-1.7\n", 60_000))
        request = types.Content(role="user", parts=parts)
        turns.append(Turn(request, answer=writer.text("prose", 0.18)))

    return Conversation(turns, media_tokens=media_tokens)


def kubernetes(writer: Writer, rounds: int = 4, share: float = 0.18) -> Conversation:
    """An assistant that asks a cluster four things for every question."""
    args = {"namespace": "prod", "output": "json"}
    turns = []
    for _ in range(rounds):
        asked = writer.ask(0.01, "Which pods are failing? ")
        steps = [
            [ToolUse(f"kubectl_{tool}", writer.result("json", share), args)]
            for tool in ("get_pods", "get_events", "describe_nodes", "get_deployments")
        ]
        turns.append(Turn(asked, steps, writer.text("prose", 0.02)))

    rules = "You look after a Kubernetes cluster. Never delete anything."
    return Conversation(turns, instruction=rules)


def coding_agent(writer: Writer) -> Conversation:
    """An agent that reads, searches, writes and tests Python source."""
    turns = []
    for turn in range(2):
        steps = []
        for cycle in range(3):
            path = f"src/shop/module_{turn}_{cycle}.py"
            source = writer.text("code", 0.08)
            steps += [
                [ToolUse("read_file", writer.text("code", 0.2), {"path": path})],
                [ToolUse("search", writer.text("log", 0.06), {"pattern": "def "})],
                [ToolUse("write_file", "ok", {"path": path, "content": source})],
                [ToolUse("run_tests", writer.text("log", 0.1))],
            ]
        turns.append(Turn(writer.ask(0.02), steps, writer.text("prose", 0.03)))

    return Conversation(turns, instruction="You are a careful software engineer.")


@dataclass(frozen=True)
class Scenario:
    """One kind of conversation, and how its provider counts and reports."""

    build: Callable[[Writer], Conversation]
    token_ratio: float | None = None
    large_ratio: float = 4.0
    usage: Literal["last", "never", "late"] = "last"
    is_long: bool = False


SCENARIOS: dict[str, Scenario] = {
    "normal talk": Scenario(normal_talk),
    "tool-heavy": Scenario(tool_heavy),
    "parallel bursts": Scenario(parallel_bursts),
    # Nothing tells the guard of another ratio than its default of 1.5.
    "no usage": Scenario(mixed, large_ratio=1.5, usage="never"),
    "fifty turns": Scenario(fifty_turns, is_long=True),
    "late usage, ratio 5": Scenario(mixed, token_ratio=5.0, usage="late"),
    "only tool results": Scenario(only_tool_results),
    "rapid short": Scenario(rapid_short),
    "empty results": Scenario(empty_results),
    "media": Scenario(media),
    "kubernetes": Scenario(kubernetes),
    "coding agent": Scenario(coding_agent),
}


@lru_cache(maxsize=4)
def write_conversation(name: str, window_tokens: int) -> Conversation:
    """Writes a scenario for a window, with the way its provider counts."""
    scenario = SCENARIOS[name]
    ratio = scenario.token_ratio
    if ratio is None and window_tokens > LARGEST_BPE_WINDOW_TOKENS:
        ratio = scenario.large_ratio
    conversation = scenario.build(Writer(name, window_tokens, ratio))
    return replace(conversation, token_ratio=ratio, usage=scenario.usage)


def total_tokens(conversation: Conversation) -> int:
    """What a whole conversation would take, by the provider's count."""
    texts = [conversation.instruction]
    media_count = content_count = 0
    for turn in conversation.turns:
        content_count += 2 + 2 * len(turn.steps)
        texts += [turn.text, turn.answer]
        if isinstance(turn.request, types.Content):
            media_count += sum(bool(p.inline_data) for p in turn.request.parts or ())
        for use in itertools.chain.from_iterable(turn.steps):
            texts += [to_json(dict(use.args)).decode(), to_json(use.result).decode()]

    counted = _simulated.count_tokens(texts, conversation.token_ratio)
    overhead = 0 if conversation.token_ratio else 3 * content_count
    return counted + media_count * conversation.media_tokens + overhead
