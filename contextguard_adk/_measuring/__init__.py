"""Tokens of texts, contents and requests, and the budgets that follow from them."""
