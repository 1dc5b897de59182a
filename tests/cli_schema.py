"""Schema of the objects that commands print with --json: docs/cli.schema.json."""

from __future__ import annotations

import json
from pathlib import Path

from jsonschema import Draft202012Validator

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "cli.schema.json").read_text(encoding="utf-8"))


def check(command: str, output: str) -> None:
    """Raise jsonschema's error if the output of a command is not as documented."""
    Draft202012Validator(SCHEMA["$defs"][command]).validate(json.loads(output))
