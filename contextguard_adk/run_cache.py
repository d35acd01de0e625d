"""What the model calls of one run measure again and again, measured once.

ADK builds the contents anew for every call, but the texts and tool results in them are
those of the session's events, the same objects throughout a run.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.genai import types

from contextguard_adk.coverage import fingerprint
from contextguard_adk.tokens import estimate_contents_tokens, json_bytes, part_bytes


class RunCache:
    """Sizes of tool results and fingerprints of contents, for one run of one agent.

    It keeps what it has measured alive, so it must not outlive the run.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[object, int]] = {}
        self._text_prints: dict[tuple[str | None, str], bytes] = {}
        self._payload_prints: dict[int, tuple[object, str | None, str, bytes]] = {}

    def estimate_contents_tokens(self, contents: Iterable[types.Content]) -> int:
        """Estimates the tokens of contents, as the function of that name does."""
        return estimate_contents_tokens(contents, self._part_bytes)

    def _part_bytes(self, part: types.Part | None) -> int:
        result = part.function_response if part is not None and not part.text else None
        if result is None or not result.response or result.parts:
            return part_bytes(part)
        payload = result.response
        known = self._sizes.get(id(payload))
        if known is None or known[0] is not payload:
            known = self._sizes[id(payload)] = (payload, json_bytes(payload))
        return json_bytes(result.name or "") + known[1]

    def fingerprint(self, content: types.Content) -> bytes:
        """Returns the fingerprint of a content, as the function of that name does."""
        parts = content.parts
        part = parts[0] if parts is not None and len(parts) == 1 else None
        if part is None:
            return fingerprint(content)
        if part.text:
            key = (content.role, part.text)
            digest = self._text_prints.get(key)
            if digest is None:
                digest = self._text_prints[key] = fingerprint(content)
            return digest
        result = part.function_response
        if result is None or result.response is None or result.parts:
            return fingerprint(content)
        payload, name = result.response, result.name or ""
        known = self._payload_prints.get(id(payload))
        if (
            known is None
            or known[0] is not payload
            or known[1:3] != (content.role, name)
        ):
            digest = fingerprint(content)
            known = (payload, content.role, name, digest)
            self._payload_prints[id(payload)] = known
        return known[3]
