"""`agentengine://` as a source of `replay` and `report`."""

from __future__ import annotations

ENGINE = "projects/project/locations/us-central1/reasoningEngines/7"
SOURCE = f"agentengine://{ENGINE}"
