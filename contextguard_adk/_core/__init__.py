"""The stages of one model call: look, decide, pay, put in, send, and recover."""
