"""Well-known models whose names are like a wrong name, such as a name of Ollama."""

from __future__ import annotations

import re

from pyvelo.models.families import FAMILIES, OWN_QUANTIZATION, Family

__all__ = ["suggest"]

MOST = 3  # models in a message
LEAST = 3  # letters and digits of a name


def suggest(name: str) -> str:
    """Return a question that names similar models on the hub, or "" if there is none."""
    if _key(name) == "demo":
        return "; for the demo model leave MODEL out, or give pyvelo.demo.DEMO_MODEL in Python"
    found = [_hub_name(family) for family in _similar(_key(name.removesuffix(":latest")))[:MOST]]
    if not found:
        return ""
    return f"; did you mean {' or '.join([', '.join(found[:-1])] * (len(found) > 1) + found[-1:])}?"


def _similar(key: str) -> list[Family]:
    """Return the families whose names begin with a key, or else the family with the longest name in front."""
    if len(key) < LEAST:
        return []
    if longer := [family for family in FAMILIES if _key(family.name).startswith(key)]:
        return longer
    shorter = [family for family in FAMILIES if key.startswith(_key(family.name))]
    return sorted(shorter, key=lambda family: len(family.name))[-1:]


def _key(name: str) -> str:
    """Return the letters and digits of a name, in which programs separate them by other characters."""
    return re.sub(r"[\W_]", "", name.casefold())


def _hub_name(family: Family) -> str:
    return f"{family.repo}:{OWN_QUANTIZATION if family.bits else 'Q4_K_M'}"
