"""`pyvelo batch`: answers to the rows of a file, without a server."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from pyvelo.cli import options as opt
from pyvelo.cli.completion import models_and_rows
from pyvelo.cli.exits import ERROR, INTERRUPTED, UsageError
from pyvelo.cli.progress import LoadingBar, RichBar
from pyvelo.cli.serve import Loras, Names, check_model_names, check_modules, loras_by_name
from pyvelo.cli.terminal import print_error, print_json, print_out
from pyvelo.cli.values import count, read_template
from pyvelo.config import EngineConfig
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import ConfigError

if TYPE_CHECKING:
    from pyvelo.batch.counts import Counts

__all__ = ["batch"]

STDIN = "-"
SNIFFED = 64  # bytes of the input that tell what it is

ModelAndRows = Annotated[
    list[str] | None,
    Argument(
        metavar="[MODEL] IN",
        autocompletion=models_and_rows,
        help="A GGUF file or a name on the hub (default: the demo model in the package), and the file of the "
        "rows; - reads standard input.",
        show_default=False,
    ),
]
Results = Annotated[
    Path,
    Option("-o", "--output", metavar="OUT", help="File of the results; what it lacks is appended."),
]
Ordered = Annotated[bool, Option("--ordered", help="Write results in the order of the input.")]


def batch(
    output: Results,
    words: ModelAndRows = None,
    ordered: Ordered = False,
    model_name: Names = None,
    chat_template: opt.ChatTemplate = None,
    kv_type: opt.KVTypeOption = "f16",
    ctx: opt.Context = None,
    block_size: opt.BlockSize = 32,
    kv_cache_bytes: opt.CacheBytes = None,
    swap_bytes: opt.SwapBytes = "0",
    kv_store: opt.KvStore = None,
    kv_store_bytes: opt.KvStoreBytes = "10G",
    max_num_seqs: opt.MaxSeqs = 256,
    max_batch_tokens: opt.MaxBatch = 512,
    threads: opt.Threads = None,
    n_gpu_layers: opt.GpuLayers = "auto",
    lora: Loras = None,
    deterministic: opt.Deterministic = False,
    attention_precision: opt.Precision = "exact",
    as_json: opt.Json = False,
) -> int:
    """Answer the rows of a file in OpenAI's batch format; a run that was ended goes on where it was.

    Exit codes: 0 if every row has an answer, 1 if rows failed, 130 after Ctrl-C or SIGTERM.
    """
    engine = opt.engine_settings({**locals(), "lora": loras_by_name(lora or ())})
    model, rows = split_words(words or ())
    if str(output) == STDIN:
        raise UsageError("-o - : results go to a file, from which a run is resumed")
    check_modules(("msgspec", "prometheus_client"))
    check_model_names(model_name or ())
    from pyvelo.batch.output import open_output
    from pyvelo.batch.run import Batch
    from pyvelo.server.settings import Settings

    settings = Settings(model_names=tuple(model_name or ()), chat_template=read_template(chat_template))
    EngineConfig(model=model, **engine)  # raises an error of the options before files are opened
    with (
        _source(rows, output) as source,
        open_output(output) as (results, held),
        _progress(model, _size(source)) as progress,
    ):
        config = EngineConfig(model=model, **engine, progress=None if progress is None else progress.load)
        show = None if progress is None else progress.show
        counts = Batch(config, settings, source, results, held, ordered, show).run()
    _report(counts, output, rows, as_json)
    if counts.interrupted:
        return INTERRUPTED
    return ERROR if counts.failed or counts.failed_before else 0


def split_words(words: Sequence[str]) -> tuple[str, str]:
    """Return the model and the input of `[MODEL] [IN]`.

    By default the demo model, and standard input if it is no terminal.
    """
    if len(words) > 2:
        raise UsageError("give MODEL and one file of rows")
    if not words or (len(words) == 1 and words[0].lower().endswith(".gguf")):
        if sys.stdin.isatty():
            raise UsageError("which rows? Give a file of JSON lines, or lines through a pipe")
        return (words[0] if words else str(DEMO_MODEL)), STDIN
    return (words[0] if len(words) == 2 else str(DEMO_MODEL)), words[-1]


@contextmanager
def _source(rows: str, output: Path) -> Iterator[FileIO]:
    """Open the input; raise ConfigError if it is the output."""
    if rows != STDIN and os.path.exists(output) and os.path.samefile(rows, output):
        raise ConfigError(f"{rows} is the file of the rows: name another one for the results")
    with FileIO(0 if rows == STDIN else rows, closefd=rows != STDIN) as file:
        if rows != STDIN and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            _check_kind(rows, file.read(SNIFFED))
            file.seek(0)
        yield file


def _check_kind(name: str, beginning: bytes) -> None:
    """Raise ConfigError for a file that has no JSON lines, by its first bytes."""
    kinds = {
        b"\x1f\x8b": f"it is packed: gzip -dc {name} | pyvelo batch - ...",
        b"\xff\xfe": "it is UTF-16 text: save it as UTF-8",
        b"\xfe\xff": "it is UTF-16 text: save it as UTF-8",
        b"GGUF": "it is a model: give MODEL and then the file of the rows",
        b"[": f"it is a JSON list, and rows are lines: jq -c '.[]' {name} | pyvelo batch - ...",
        b"PK\x03\x04": "it is a ZIP archive: unpack it first",
    }
    for start, what in kinds.items():
        if beginning.lstrip().startswith(start):
            raise ConfigError(f"{name} is no file of rows: {what}")


def _size(source: FileIO) -> int:
    """Return the bytes of the input; 0 if they are unknown, as in a pipe."""
    return os.fstat(source.fileno()).st_size


class _Progress:
    """Bar of the load, and then of the rows.

    Args:
        size: bytes of the input; 0: unknown.
    """

    def __init__(self, model: str, size: int) -> None:
        self._loading = LoadingBar(partial(RichBar, f"loading {os.path.basename(model)}"))
        self._rows: RichBar | None = None
        self._size = size
        self._start = 0.0

    def load(self, share: float) -> None:
        """Show the share of the model that is loaded or packed."""
        if self._rows is None:
            self._loading(share)

    def show(self, counts: Counts) -> None:
        """Show how far the rows are, after the first answer: the model is packed then."""
        if counts.answered == counts.failed:
            return
        if self._rows is None:
            self._loading.close()
            self._rows, self._start = RichBar("rows"), time.monotonic()
        seconds = time.monotonic() - self._start
        rate = f", {counts.completion_tokens / seconds:,.0f} tokens/s" if seconds > 1 else ""
        failed = f", {counts.failed:,} failed" if counts.failed else ""
        self._rows.name(f"{count(counts.answered + counts.skipped, 'row')}{failed}{rate}")
        if self._size:
            self._rows.show(counts.read_bytes / self._size)

    def close(self) -> None:
        """Remove the bar."""
        self._loading.close()
        if self._rows is not None:
            self._rows.close()


@contextmanager
def _progress(model: str, size: int) -> Iterator[_Progress | None]:
    """Yield the progress; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    progress = _Progress(model, size)
    try:
        yield progress
    finally:
        progress.close()


def _report(counts: Counts, output: Path, rows: str, as_json: bool) -> None:
    """Print the numbers of a run, and the first errors of rows."""
    for error in counts.errors:
        print_error(f"pyvelo: {error}")
    if counts.failed > len(counts.errors):
        print_error(f"pyvelo: and {count(counts.failed - len(counts.errors), 'other row')} failed")
    if counts.wrong_model:
        print_error("pyvelo: --model-name '*' takes every name of a model")
    if counts.failed or counts.failed_before:
        print_error(f"pyvelo: to run failed rows again, delete their lines in {output}")
    if counts.interrupted:
        again = "with the same input " if rows == STDIN else ""
        print_error(f"pyvelo: interrupted; the same command {again}goes on with the rows that {output} lacks")
    if as_json:
        numbers: dict[str, Any] = asdict(counts)
        del numbers["errors"], numbers["read_bytes"], numbers["wrong_model"]
        rate = {"tokens_per_second": counts.tokens_per_second}
        print_json({"output": str(output), **numbers, **rate}, indent=None)
    else:
        print_out(summary(counts))


def summary(counts: Counts) -> str:
    """Return the numbers of a run in one line."""
    parts = [f"{count(counts.answered, 'row')} in {counts.seconds:.1f} s"]
    if counts.skipped:
        parts.append(f"{counts.skipped:,} had a result before")
    if n_failed := counts.failed + counts.failed_before:
        parts.append(f"{n_failed:,} failed")
    parts.append(f"{count(counts.prompt_tokens, 'prompt token')}")
    parts.append(f"{count(counts.completion_tokens, 'new token')}")
    if counts.tokens_per_second:
        parts.append(f"{counts.tokens_per_second:,.1f} tokens per second")
    return ", ".join(parts)
