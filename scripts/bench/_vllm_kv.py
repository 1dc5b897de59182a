"""Time two operations of bench/kv.py in vLLM; bench/kv.py runs it with a Python that has vLLM.

Prints microseconds as JSON: for each block that BlockPool takes and frees, with prefix caching on; and for
the admission of a prompt that was computed before: Request with its block hashes (vLLM's default, sha256),
KVCacheManager's get_computed_blocks and allocate_slots, and free. Uses no device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts.bench._timing import microseconds


def take_and_free(rounds: int, size: int, n: int) -> float:
    """Time taking and freeing `n` blocks at once; return microseconds of a block."""
    pool = BlockPool(4 * n + 1, True, size)
    return microseconds(rounds, lambda: lambda: pool.free_blocks(reversed(pool.get_new_blocks(n)))) / n


def manager_of(n_blocks: int, size: int, longest: int) -> Any:
    """Return a manager of one full-attention layer."""
    spec = FullAttentionSpec(block_size=size, num_kv_heads=8, head_size=128, dtype=torch.float16)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return KVCacheManager(KVCacheConfig(n_blocks + 1, [], groups), longest, size, size)


def admission(rounds: int, size: int, n_tokens: int) -> float:
    """Time the admission of a prompt that is cached, from its tokens on."""
    manager = manager_of(2 * n_tokens // size, size, n_tokens + size)
    hasher = get_request_block_hasher(size, sha256)
    prompt = list(range(n_tokens))
    numbers = iter(range(1 << 30))

    def admit() -> int:
        params = SamplingParams(max_tokens=1)
        request = Request(str(next(numbers)), prompt, params, None, block_hasher=hasher)
        hits, n_hit = manager.get_computed_blocks(request)[:2]
        taken = manager.allocate_slots(request, n_tokens - n_hit, n_hit, hits)
        if taken is None:
            raise SystemExit("the pool is too small")
        manager.free(request)
        return int(n_hit)

    admit()
    if admit() < n_tokens - size:
        raise SystemExit("the prompt was not found")
    return microseconds(rounds, lambda: admit)


def main() -> None:
    rounds, size, n_blocks, n_tokens = map(int, sys.argv[1:])
    init_none_hash(sha256)
    found = {"take": take_and_free(rounds, size, n_blocks), "admit": admission(rounds, size, n_tokens)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
