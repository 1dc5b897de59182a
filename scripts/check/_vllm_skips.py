"""Cases of vLLM's tests that do not apply to `pyvelo serve`, each with the reason."""

from __future__ import annotations

OPTIONS: dict[str, str] = {
    "--enable-force-include-usage": "usage comes if the request asks for it",
    "--root-path": "a proxy's path is cut by the proxy",
    "--reasoning-parser": "reasoning is parsed by the model's template",
}
"""Options of vLLM without a counterpart; a case whose server has one is skipped."""

DIFFERENT: dict[str, str] = {}
"""Beginnings of the names of cases."""
