"""OpenAI's Responses API behind ADK's class for it, without its HTTP client."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.fake_openai import FakeOpenAI
from tests.fake_provider import RefusalError
from tests.protocols import Reply

KINDS = ("image/png", "image/jpeg", "image/webp", "image/gif", "application/pdf")


@dataclass
class FakeResponses(FakeOpenAI):
    """A model behind `/responses`."""

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
        said = {"type": "output_text", "text": reply.text}
        output: list[Any] = [{"type": "message", "content": [said]}]
        for number, call in enumerate(reply.calls):
            place = {"call_id": f"call-{reply.number}-{number}", "name": call.name}
            arguments = json.dumps(call.args)
            output.append({"type": "function_call", **place, "arguments": arguments})

        tokens = reply.prompt_tokens, reply.output_tokens
        usage = dict(zip(("input_tokens", "output_tokens"), tokens, strict=True))
        return {"status": "completed", "output": output, "usage": usage}


def check_block(block: dict[str, Any]) -> None:
    """Refuses files of other kinds, and what cannot be fetched."""
    held = block.get("image_url") or block.get("file_data") or ""
    if block["type"] == "input_file" and not held:
        raise RefusalError("The file could not be downloaded.")
    if held and not held.startswith(tuple(f"data:{kind};base64," for kind in KINDS)):
        raise RefusalError("The file has an unsupported MIME type.")
