"""Blocks of the KV cache: their bytes, their pool, prefixes, plans and the block manager."""
