"""The former place of `json_text`."""

from contextguard_adk.measuring.tokens import json_text as json_text
