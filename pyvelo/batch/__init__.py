"""Batches: rows of a file in OpenAI's batch format, answered without a server."""
