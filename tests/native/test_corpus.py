"""Files that libFuzzer found: each one is refused or runs for a token, and the process survives."""

from __future__ import annotations

import collections
import lzma
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CODE = """
import sys
from pathlib import Path
from pyvelo import LLM, SamplingParams, VeloError
from pyvelo.errors import InternalError

def attempt(path, deterministic):
    sizes = {"n_ctx": 128, "kv_cache_bytes": 4 << 20, "max_num_seqs": 1, "max_batch_tokens": 32}
    one = SamplingParams(max_tokens=1, temperature=0)
    try:
        with LLM(path, deterministic=deterministic, n_threads=1, **sizes) as llm:
            llm.generate([0], one)
    except InternalError:
        raise
    except VeloError as error:
        if ".cpp" in str(error):  # a line of source code does not help a user
            raise
        return "refused"
    return "ran"

for path in sorted(Path(sys.argv[1]).iterdir()):
    for deterministic in (False, True):
        print(path.name, flush=True)
        print(attempt(path, deterministic), flush=True)
"""


def test_the_corpus(tmp_path: Path) -> None:
    files = sorted((HERE / "corpus").glob("*.xz"))
    assert len(files) >= 20
    for file in files:
        (tmp_path / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, lines[-1:] + done.stderr.splitlines()[:20]
    kinds = collections.Counter(lines[1::2])
    assert kinds["ran"] + kinds["refused"] == 2 * len(files)
    assert min(kinds["ran"], kinds["refused"]) >= 10
