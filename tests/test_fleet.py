"""`--all-sessions` of `replay` and `report`: every session of a database, by agent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.sqlite_session_service import SqliteSessionService

from contextguard_adk._tools.cli import main
from contextguard_adk._tools.recordings import SessionKey, load_session
from contextguard_adk._tools.replay import ReplaySettings, replay_session
from tests.test_databases import POSTGRES_URL, open_file, Store, store_marks

WINDOW = 8_000
