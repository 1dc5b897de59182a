"""Blocks of KV cache: their bytes, their pool, and who holds them. No model or request is known here."""
