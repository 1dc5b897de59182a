"""Fuzz `pyvelo serve` with requests that schemathesis draws from its /openapi.json.

    pip install schemathesis
    python scripts/check/schema_fuzz.py
    python scripts/check/schema_fuzz.py --requests 100000 --seed 7

The server runs the demo model in a process of its own. Half of the requests follow the schemas, the others
break them. Most of both get sensible values in a part of their fields, such as roles and ids that exist, so
that they pass the first checks. Answers are bounded to a few tokens.

An answer is wrong if its status, type or shape is not documented, if it is a 5xx other than 503 and 504, or
if it takes longer than a minute. Afterwards no block may be in use. Prints the answers by status, and a
command of curl for each kind of wrong answer; the exit status is 0 if there is none.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts._served import served

OPTIONS = ("--ctx", "512", "--kv-cache-bytes", "32M", "--max-num-seqs", "16")


def main() -> int:
    """Fuzz and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000, help="at least (default: 5000)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        from scripts.check._schema_requests import Fuzz
    except ImportError as error:
        raise ScriptError(f"{error}: pip install schemathesis") from None
    with served(*OPTIONS) as server:
        fuzz = Fuzz(server.url, random.Random(given.seed))
        fuzz.rounds(given.requests)
        if used := fuzz.used_blocks():
            fuzz.wrong[f"{used:g} blocks are in use"] = ""
    counts = ", ".join(f"{n} x {status}" for status, n in sorted(fuzz.statuses.items()))
    print(f"{fuzz.n_sent} answers: {counts}")
    for what, command in fuzz.wrong.items():
        print(f"{what}\n    {command[:2000]}", file=sys.stderr)
    return 1 if fuzz.wrong else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
