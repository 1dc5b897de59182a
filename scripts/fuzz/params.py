"""Send valid and invalid requests to a model: each must give an answer or one of PyVelo's errors.

    python scripts/fuzz/params.py MODEL --count 10000
    python scripts/fuzz/params.py MODEL --seed 7 --replay 1234

All requests run in one process, so what one leaves behind meets the next. After each, every block must be
free. A finding is a line with the number of its request: another exception, blocks that stay used, or more
than --limit seconds, which end the run with the stack of every thread.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo import LLM, BeamSearchParams, SamplingParams
from pyvelo.errors import InternalError, VeloError
from scripts.fuzz._hostile import Hostile, hostile
from scripts.models.lora import random_pairs, write_adapter

SIZES: dict[str, Any] = {
    "n_ctx": 128,
    "kv_cache_bytes": 4 << 20,
    "max_num_seqs": 8,
    "max_batch_tokens": 64,
    "n_threads": 1,
}
LONGEST = 2000  # characters of an error's message


def attempt(llm: LLM, request: Hostile) -> tuple[str, str]:
    """Send the request; return "served", "refused" or a finding, and the error."""
    try:
        _ask(llm, request)
    except InternalError as error:
        return "internal", repr(error)
    except VeloError as error:
        long = len(str(error)) > LONGEST
        return "unreadable" if long else "refused", f"{type(error).__name__}: {str(error)[:LONGEST]}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic in a Rust library is no Exception
        return "escaped", f"{type(error).__name__}: {str(error)[:200]}"
    used = llm.stats().blocks_used
    return ("leaked", f"{used} blocks are used") if used else ("served", "")


def _ask(llm: LLM, request: Hostile) -> None:
    if request.way == "beam_search":
        llm.beam_search(request.prompt, BeamSearchParams(**request.params))
        return
    params = SamplingParams(**request.params)
    match request.way:
        case "generate":
            llm.generate(request.prompt, params, **request.keywords)
        case "stream":
            _drain(llm.stream(request.prompt, params, **request.keywords))
        case "chat":
            llm.chat(request.prompt, params, **request.keywords)
        case "chat_stream":
            _drain(llm.chat_stream(request.prompt, params, **request.keywords))
        case _:
            with llm.session(request.prompt, cache_salt=params.cache_salt, lora=params.lora) as session:
                session.generate(params)
                session.append(" more")
                _drain(session.stream(params))


def _drain(pieces: Iterable[object]) -> None:
    collections.deque(pieces, maxlen=0)


def run(llm: LLM, args: argparse.Namespace) -> int:
    """Send all requests, print findings as they come and the counts at the end.

    Returns the number of findings.
    """
    counts: collections.Counter[str] = collections.Counter()
    started = time.monotonic()
    for index in range(args.first, args.first + args.count):
        request = hostile(args.seed, index)
        faulthandler.dump_traceback_later(args.limit, exit=True, file=2)
        kind, message = attempt(llm, request)
        counts[kind] += 1
        if args.verbose or kind not in ("served", "refused"):
            print(f"{index}: {kind} [{request.way} {sorted(request.params)}] {message}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    found = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"{args.count} requests of seed {args.seed} in {time.monotonic() - started:.0f} s: {found}")
    return sum(counts.values()) - counts["served"] - counts["refused"]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first request")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for one request")
    parser.add_argument(
        "--replay", type=int, metavar="INDEX", help="send this request alone and show its stack"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print every outcome")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if nothing was found."""
    args = _arguments(argv)
    with TemporaryDirectory() as folder, LLM(args.model, **SIZES) as llm:
        adapter = Path(folder, "random.gguf")
        write_adapter(adapter, llm.info.arch, random_pairs(args.model, 4))
        llm.load_lora("random", adapter)
        if args.replay is None:
            return 1 if run(llm, args) else 0
        request = hostile(args.seed, args.replay)
        given = {**request.params, **request.keywords}
        print(request.way, {name: repr(value)[:200] for name, value in given.items()}, flush=True)
        _ask(llm, request)
    return 0


if __name__ == "__main__":
    sys.exit(main())
