"""The arrays of a step: rows that stay from step to step equal the block tables."""

from __future__ import annotations

import pytest

from .fakes import Bench, answer


@pytest.mark.parametrize("n_tokens", [9, 17, 33])
def test_an_idle_session_leaves_no_old_block_in_its_row(n_tokens: int) -> None:
    """Park a session at the end of a block; the block behind goes to another request."""
    bench = Bench(n_blocks=24, block_size=8)
    sequence = bench.sequence(range(1, n_tokens + 1))
    beside, computed = bench.submit([90] * 3, 1), bench.go_on(sequence, 0)
    bench.finish(beside, computed)
    assert sequence.table is not None
    assert len(sequence.table.blocks) == n_tokens // 8
    sequence.tokens.extend([95, 96])
    wanted = answer(sequence.tokens, 6)
    other = bench.submit([91] * 4, 12)  # takes the block that the session has left
    mine = bench.go_on(sequence, 6)
    bench.finish(mine, other)
    assert mine.generated_ids == wanted
    assert other.generated_ids == answer([91] * 4, 12)
    bench.core.inbox.release(sequence)
    bench.core.settle()
    bench.assert_idle()


def test_only_the_last_token_of_a_prompt_gives_logits() -> None:
    bench = Bench(max_batch_tokens=16)
    outputs = bench.core._arrays.outputs
    request = bench.submit(range(1, 22), 2)
    bench.step()
    assert outputs[:16].tolist() == [0] * 16
    bench.step()
    assert outputs[:5].tolist() == [0, 0, 0, 0, 1]
    bench.finish(request)
