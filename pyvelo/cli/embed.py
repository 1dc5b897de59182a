"""`pyvelo embed`: vectors of texts, a line for each."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pyvelo.cli.exits import UsageError
from pyvelo.cli.progress import loading
from pyvelo.cli.run import read_prompt
from pyvelo.cli.terminal import print_json, print_out
from pyvelo.cli.values import parse_argument
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import ConfigError, RequestError, shown
from pyvelo.models.hub import locate

if TYPE_CHECKING:
    from pyvelo.outputs import Pooling

__all__ = ["check_model", "print_vectors", "read_texts"]


def check_model(model: str, texts: Sequence[str] | None, file: Path | None) -> None:
    """Raise UsageError if there is no text, and the model may be one: it has no place for a model."""
    if texts or file is not None or model == str(DEMO_MODEL) or os.path.exists(model) or "/" in model:
        return
    raise UsageError(f"{shown(model)} is read as MODEL: give a text with -p TEXT, or lines with -f FILE")


def read_texts(texts: Sequence[str] | None, file: Path | None) -> list[str]:
    """Return the texts of the options, or the lines of a file or of standard input (`-`, or no option).

    Raises:
        UsageError: there is no text, or too many sources.
    """
    if texts and (file is not None or (len(texts) > 1 and "-" in texts)):
        raise UsageError("give -p or -f, not both, and - alone")
    if texts and list(texts) != ["-"]:
        return [parse_argument(text, "the text") for text in texts]
    if not texts and file is None and sys.stdin.isatty():
        raise UsageError("which texts? Give -p TEXT, or lines with -f FILE or through a pipe")
    content = read_prompt("-" if file is None else None, file)
    # not splitlines: it also ends a line at a form feed or U+2028
    lines = content.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if not content:
        raise ConfigError("there is no line to embed")
    return lines


def print_vectors(
    model: str,
    texts: Sequence[str],
    *,
    where: str,
    pooling: str | None,
    normalize: bool,
    as_json: bool,
    engine: dict[str, Any],
) -> int:
    """Load the model and print a line of numbers for each text, or one JSON object; return the exit code.

    where: source of the texts for errors, before the number of a text.
    """
    from pyvelo import LLM

    path = locate(model)
    with loading(path) as progress, LLM(path, progress=progress, **engine) as llm:
        try:
            # the engine checks the name
            vectors = llm.embed(texts, pooling=cast("Pooling | None", pooling), normalize=normalize)
        except RequestError as error:  # which counts texts from 0
            message = re.sub(r"^text (\d+)", lambda found: f"{where} {int(found[1]) + 1}", str(error))
            raise RequestError(message) from None
    if as_json:
        numbers = [[float(f"{x:.8g}") for x in row] for row in vectors.tolist()]
        print_json({"model": path, "dimensions": vectors.shape[1], "vectors": numbers}, indent=None)
    else:
        for row in vectors.tolist():
            print_out(" ".join(f"{x:.8g}" for x in row))
    return 0
