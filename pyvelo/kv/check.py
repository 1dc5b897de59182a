"""Whether a plan can be carried out as it is: checked against the pool before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from pyvelo.errors import InternalError
from pyvelo.kv.draft import BlockTable, Change, Swapped
from pyvelo.kv.pool import BlockPool

__all__ = ["Holders", "check_changes"]


class Holders(NamedTuple):
    """What refers to blocks: live tables and sequences in host memory, both by their ids."""

    tables: Mapping[int, BlockTable]
    asleep: Mapping[int, Swapped]
    promised: int
    n_swap_free: int


def check_changes(changes: Collection[Change], pool: BlockPool, holders: Holders, size: int) -> None:
    """Raise InternalError if the changes of a plan cannot all be made."""
    for change in changes:
        _check_table(change, holders, size)
    if len({id(change.table) for change in changes}) < len(changes):
        raise InternalError("a plan changes a block table twice")
    woken = [id(change.wakes) for change in changes if change.wakes is not None]
    if len(set(woken)) < len(woken):
        raise InternalError("two sequences come back from the same blocks of host memory")
    _check_blocks(changes, pool, holders.promised)
    n_swapped = sum(-(-change.sleeps.n_tokens // size) for change in changes if change.sleeps is not None)
    if n_swapped > holders.n_swap_free:
        raise InternalError(f"a plan takes {n_swapped} swap blocks, {holders.n_swap_free} are free")


def _check_table(change: Change, holders: Holders, size: int) -> None:
    table, match = change.table, change.match
    if match is None:
        if holders.tables.get(id(table)) is not table:
            raise InternalError("a table that is dropped, resumes or grows must be a live one")
    elif id(table) in holders.tables or tuple(table.blocks) != match.blocks:
        raise InternalError("a table that starts must be a new one of the blocks that are there")
    if change.leaves:
        if match is not None or change.resumes or change.copies or change.n_blocks or change.promised:
            raise InternalError("a table that is dropped can take no other part in the plan")
    elif change.n_blocks < len(table.blocks) or change.promised < 0:
        raise InternalError(f"a plan leaves a table {change.n_blocks} blocks and promises {change.promised}")
    swapped = change.sleeps
    if swapped is not None and (not change.leaves or swapped.blocks or swapped.n_tokens != table.n_tokens):
        raise InternalError("a sequence goes to host memory as it is, and when its table is dropped")
    if change.wakes is not None and (match is None or id(change.wakes) not in holders.asleep):
        raise InternalError("a sequence that comes back is not in host memory")
    if match is not None and change.n_blocks * size < table.n_tokens:
        raise InternalError("a sequence that starts with a block to fill must grow into it")
    if change.copies and table.n_tokens // size >= len(table.blocks):
        raise InternalError("a plan copies a block that its table has not")


def _check_blocks(changes: Collection[Change], pool: BlockPool, promised: int) -> None:
    """Count the references that the plan adds and drops, and the blocks that this leaves to take."""
    references: Counter[int] = Counter()
    n_taken, n_free = 0, pool.n_free
    for change in changes:
        match, table = change.match, change.table
        if match is not None:
            hits = match.blocks if match.head is None else (*match.blocks, match.head.block)
            if not all(0 <= block < pool.n_blocks and pool.readers(block) for block in hits):
                raise InternalError("a sequence starts with a block that holds nothing")
            references.update(hits)
        elif change.leaves:
            references.subtract(table.blocks)
        n_taken += change.n_taken
        promised += change.promised - (table.promised if match is None else 0)
    for block, n in references.items():
        before = pool.references(block)
        if before + n < 0:
            raise InternalError(f"a plan drops {-n} references to block {block}, which has {before}")
        n_free += (before + n == 0) - (before == 0)
    if n_taken + promised > n_free:
        raise InternalError(f"a plan takes {n_taken} blocks and promises {promised}, but {n_free} are free")
