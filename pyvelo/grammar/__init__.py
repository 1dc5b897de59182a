"""Grammars that outputs follow: GBNF, JSON schemas and regular expressions, with limits."""
