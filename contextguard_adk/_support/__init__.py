"""Used by all other parts: settings models, logs, quoting, redaction, tables."""
