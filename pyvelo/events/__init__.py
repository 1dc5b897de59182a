"""KV events over ZMQ, as vLLM has them: routers learn which prefixes are cached. Needs the extra `events`."""
