"""Measure `pyvelo serve` and llama-server with vLLM's load generator, `vllm-rs bench serve`.

    python scripts/bench/vllm_bench.py
    python scripts/bench/vllm_bench.py model.gguf --requests 200 --rate 2 --goodput ttft:10000 tpot:500 --json

The program is a native one in vLLM's wheel (336 MB), which pip downloads once; only the program is kept, in
the cache. Requests arrive as a Poisson process and have random tokens. The servers get the same file,
threads, tokens of a step and bytes of KV cache, one after the other; llama-server runs in the modes of
bench/serving.py. Goodput is the requests per second within the limits of --goodput, in milliseconds.
bench/engine.py's model is the default.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, cache_root, run_main
from scripts.bench._runs import default_model, output_of, stock_folder
from scripts.bench._serving import Load
from scripts.bench._sides import Plan, our_server, stock_modes, stock_server
from scripts.bench.serving import in_worker

VERSION = "0.33.0"
N_VOCAB = 256
"""Prompts have tokens below this one, which every vocabulary has."""
OURS = "PyVelo"
COLUMNS = {
    "request_goodput": "good/s",
    "output_throughput": "tokens/s",
    "completed": "completed",
    "failed": "failed",
    "median_ttft_ms": "TTFT p50 ms",
    "p99_ttft_ms": "TTFT p99 ms",
    "median_tpot_ms": "TPOT p50 ms",
    "p99_tpot_ms": "TPOT p99 ms",
}
"""Fields of the program's result."""


def program(named: Path | None) -> Path:
    """Return the load generator; download it if it is not in the cache."""
    found = named or cache_root() / f"vllm-rs-{VERSION}"
    if found.is_file():
        return found
    if named is not None:
        raise ScriptError(f"there is no {named}")
    with tempfile.TemporaryDirectory() as folder:
        print(f"downloading the wheel of vllm {VERSION} …", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        output_of([*command, "-d", folder, f"vllm=={VERSION}"])
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read("vllm/vllm-rs")
    found.parent.mkdir(parents=True, exist_ok=True)
    partial_file = found.with_suffix(".part")
    partial_file.write_bytes(content)
    partial_file.chmod(0o755)
    return partial_file.replace(found)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one word a token, of which the program draws prompts; it sends the ids."""
    words = {f"w{number}": number for number in range(N_VOCAB)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (folder / "tokenizer.json").write_text(json.dumps(whole | nothing | {"model": model}), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")


def load(tool: Path, port: int, given: argparse.Namespace) -> dict[str, Any]:
    """Send the requests to a server; return the program's result."""
    body = {"temperature": 0, "cache_prompt": False}
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        options = {
            "--port": port,
            "--tokenizer": folder,
            "--random-input-len": given.prompt,
            "--random-output-len": given.answer,
            "--random-range-ratio": given.spread,
            "--num-prompts": given.requests,
            "--request-rate": given.rate,
            "--seed": given.seed,
            "--extra-body": json.dumps(body),
            "--result-dir": folder,
            "--result-filename": "result.json",
        }
        flags = ["--prompt-token-ids", "--ignore-eos", "--disable-tqdm", "--save-result", "--goodput"]
        command = [str(tool), "bench", "serve", "--backend", "openai"]
        command += [str(each) for pair in options.items() for each in pair] + flags + given.goodput
        output_of(command)
        return dict(json.loads((Path(folder) / "result.json").read_text(encoding="utf-8")))


def measure(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the figures of each side."""
    longest = round((1 + given.spread) * max(given.prompt, given.answer)) + 1
    plan = Plan(
        model=given.model or default_model(),
        kv_type=given.kv_type,
        kv_bytes=given.kv_bytes,
        threads=given.threads,
        batch=given.batch,
        load=Load(given.requests, given.rate, given.prompt, given.answer, 1, longest, given.seed),
        ttft_limit=0.0,
        tbt_limit=0.0,
        tries=1,
    )
    n_cache = plan.kv_bytes // in_worker(plan, "probe")["token_bytes"]
    stock = stock_folder(given.stock_bin, "--server") / "llama-server"
    servers: dict[str, AbstractContextManager[int]] = {
        OURS: our_server(plan, given.requests, given.requests * longest)
    }
    for mode in stock_modes(n_cache, 2 * longest, given.unified_slots):
        servers[mode.name] = stock_server(plan, stock, mode, given.requests)
    tool, found = program(given.program), {}
    for name, server in servers.items():
        with server as port:
            result = load(tool, port, given)
        found[name] = {field: result[field] for field in COLUMNS}
    return found


def main() -> int:
    """Measure and print a Markdown table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--program", type=Path, help="vllm-rs; default: of vLLM's wheel")
    parser.add_argument("--stock-bin", type=Path, help="folder of a stock llama-server; default: built here")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--kv-bytes", type=int, default=900 << 20, help="bytes of each side's KV cache")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rate", type=float, default=0.5, help="arrivals per second; inf: all at once")
    parser.add_argument("--prompt", type=int, default=256, help="tokens, on the average")
    parser.add_argument("--answer", type=int, default=128, help="tokens, on the average")
    parser.add_argument("--spread", type=float, default=0.5, help="lengths differ by up to this share")
    parser.add_argument("--unified-slots", type=int, nargs="+", default=[], help="as bench/serving.py's")
    parser.add_argument("--goodput", nargs="+", default=["ttft:10000", "tpot:500"], metavar="TIME:MS")
    parser.add_argument("--batch", type=int, default=512, help="tokens of a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_intermixed_args()
    if not 0 <= given.spread < 1:
        raise ScriptError("--spread must be from 0 to below 1")
    found = measure(given)
    if given.json:
        print(json.dumps(found))
        return 0
    print(f"| | {' | '.join(COLUMNS.values())} |\n|---{'|---:' * len(COLUMNS)}|")
    for name, row in found.items():
        print(f"| {name} | {' | '.join(f'{value:.4g}' for value in row.values())} |")
    best = max(row["request_goodput"] for name, row in found.items() if name != OURS)
    if best:
        print(f"\nGoodput against the better stock mode: {found[OURS]['request_goodput'] / best:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
