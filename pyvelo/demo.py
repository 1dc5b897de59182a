"""Path of the small model inside the package, for first steps and tests without a download."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DEMO_MODEL", "DEMO_NOTE"]

DEMO_MODEL = Path(__file__).parent / "assets" / "demo.gguf"

DEMO_NOTE = (
    "This is PyVelo's own demo model: tiny, it adds numbers below 100, recalls people from the chat, and "
    "talks about itself. For a real one: pyvelo pull ORG/REPO:QUANT, or name a GGUF file."
)
