"""Runs the command line as `python -m contextguard_adk`."""

from __future__ import annotations

import sys

from contextguard_adk._tools.cli import main

sys.exit(main())
