"""OpenAI's Responses API: over HTTP, or behind ADK's class without its HTTP client."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from tests.fake_openai import FakeOpenAI
from tests.fake_provider import RefusalError
from tests.protocols import Reply

KINDS = ("image/png", "image/jpeg", "image/webp", "image/gif", "application/pdf")


@dataclass
class FakeResponses(FakeOpenAI):
    """A model behind `/responses`."""

    path: ClassVar[str] = "/responses"
    compactions: int = 0

    @property
    def client(self) -> Any:
        """What stands in the place of OpenAI's own client."""
        return SimpleNamespace(responses=SimpleNamespace(create=self._create))

    async def _create(self, **request: Any) -> Any:
        body = json.loads(json.dumps(request, default=str))
        body["messages"] = body["input"][-1:]
        status, answer = self.receive(self.path, body)
        if status != 200:
            raise RefusalError(answer["error"]["message"], status=status)
        return answer

    def check(self, body: dict[str, Any]) -> None:
        asked = [each["call_id"] for each in body["input"] if "arguments" in each]
        for each in body["input"]:
            if each["type"] == "function_call_output" and each["call_id"] not in asked:
                raise RefusalError("openai orphan")
            content = each.get("content") or ()
            for block in content if isinstance(content, list) else ():
                check_block(block)

    def answer(self, body: dict[str, Any], reply: Reply) -> Any:
        """The body of an answer."""
        said = {"type": "output_text", "text": reply.text, "annotations": []}
        message = {"type": "message", "id": "m", "role": "assistant"}
        output: list[Any] = [message | {"status": "completed", "content": [said]}]
        if asks_to_compact(body):
            self.compactions += 1
            item = {"type": "compaction", "id": "c", "encrypted_content": "All so far."}
            output.insert(0, item)
        for number, call in enumerate(reply.calls):
            place = {"call_id": f"call-{reply.number}-{number}", "name": call.name}
            arguments = json.dumps(call.args)
            output.append({"type": "function_call", **place, "arguments": arguments})

        tokens = reply.prompt_tokens, reply.output_tokens
        usage = dict(zip(("input_tokens", "output_tokens"), tokens, strict=True))
        usage["total_tokens"] = sum(tokens)
        about = {"id": "r", "object": "response", "created_at": 0}
        about |= {"model": body["model"], "status": "completed"}
        return {**about, "output": output, "usage": usage}


def asks_to_compact(body: dict[str, Any]) -> bool:
    """Whether the provider compacts: no request of this fake is below the trigger."""
    asked = [each["type"] for each in body.get("context_management") or ()]
    sent = [each["type"] for each in body["input"]]
    return "compaction" in asked and "compaction" not in sent


def check_block(block: dict[str, Any]) -> None:
    """Refuses files of other kinds, and what cannot be fetched."""
    held = block.get("image_url") or block.get("file_data") or ""
    if block["type"] == "input_file" and not held:
        raise RefusalError("The file could not be downloaded.")
    if held and not held.startswith(tuple(f"data:{kind};base64," for kind in KINDS)):
        raise RefusalError("The file has an unsupported MIME type.")
