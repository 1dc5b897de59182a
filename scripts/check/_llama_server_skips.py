"""Cases of llama-server's tests that do not apply to `pyvelo serve`, each with the reason."""

from __future__ import annotations

MISSING = {
    "model_draft": "no speculative decoding",
    "spec_type": "no speculative decoding",
    "enable_ctx_shift": "a context does not shift: an answer ends at its limit",
    "server_reranking": "no reranking",
    "slot_save_path": "there are no slots: /v1/sessions keeps and forks conversations",
    "sleep_idle_seconds": "a model stays loaded",
    "ui_mcp_proxy": "no proxy for MCP servers",
    "server_tools": "the server runs no tools",
    "mcp_servers_config": "no MCP servers",
    "mcp_servers_json": "no MCP servers",
    "models_dir": "a server has one model",
    "models_preset": "a server has one model",
    "mmproj_url": "prompts are text",
    "media_path": "prompts are text",
    "gcp_compat": "no form of Google's platform",
    "model_tags": "models have no tags",
    "lora_files": "adapters are models with names, not scales by number",
    "backend_sampling": "sampling has one implementation",
}
"""Options of llama-server without a counterpart; a case that sets one is skipped."""

DIFFERENT: dict[str, str] = {}
"""Beginnings of the names of cases."""
