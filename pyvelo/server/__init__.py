"""OpenAI-compatible server over the engine. It needs the extra `serve`."""
