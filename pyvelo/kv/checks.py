"""Counts and checks over all block tables, which no step needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pyvelo.errors import InternalError
from pyvelo.kv.pool import BlockPool, BlockTable
from pyvelo.kv.prefix import PrefixIndex

__all__ = ["audit_index", "audit_own_blocks", "audit_prefixes", "audit_tables", "stored_tokens"]


def stored_tokens(pool: BlockPool, tables: Collection[BlockTable], size: int) -> int:
    """Return the tokens in the blocks of live tables; tokens in shared blocks count once."""
    unused = dict[int, int]()
    for table in tables:
        unused.update(dict.fromkeys(table.snapshot, size))
        begin = table.n_tokens // size
        for first, blocks in zip(table.firsts, table.groups, strict=True):
            for index, block in enumerate(blocks[begin - first :], begin):
                beyond = min(size, (index + 1) * size - table.n_tokens)
                unused[block] = min(beyond, unused.get(block, size))
    shared = {block for block in unused if pool.references(block) > 1}
    for table in tables if shared else ():
        begin = table.n_tokens // size
        for first, blocks in zip(table.firsts, table.groups, strict=True):
            unused.update(dict.fromkeys(shared.intersection(blocks[: begin - first]), 0))
    return (pool.n_blocks - pool.n_free) * size - sum(unused.values())


def audit_tables(pool: BlockPool, tables: Collection[BlockTable], reserved: int) -> None:
    """Raise InternalError if the pool does not count the blocks that tables hold and reserve."""
    pool.audit(block for table in tables for block in table.held)
    named = sum(table.reserved for table in tables)
    if named != reserved or named > pool.n_free:
        raise InternalError(f"{reserved} blocks reserved, tables say {named}, {pool.n_free} are free")


def audit_own_blocks(pool: BlockPool, tables: Iterable[BlockTable]) -> None:
    """Raise InternalError if a table shares blocks that it writes to without a copy."""
    for table in tables:
        for block in table.in_order(max(table.n_shared, table.n_published), table.n_blocks):
            if pool.readers(block) != 1:
                raise InternalError(f"block {block} has {pool.readers(block)} readers, its table knows one")


def audit_prefixes(index: PrefixIndex) -> None:
    """Raise InternalError if the tables disagree."""
    listed = {block: id(prefix) for block, prefix in enumerate(index._by_block) if prefix is not None}
    prefixes = index.by_hash.values()
    places = [(block, id(p)) for p in prefixes for blocks in (*p.blocks, p.snapshot) for block in blocks]
    if listed != dict(places) or len(listed) != len(places):
        raise InternalError("prefix index: hashes and blocks do not agree")
    if any(len(prefix.snapshot) not in (0, index._layout.state_blocks) for prefix in prefixes):
        raise InternalError("prefix index: a snapshot has too few blocks, or too many")
    for known, prefix in index.by_hash.items():
        if (
            prefix.hash != known
            or not prefix.is_listed
            or not (any(prefix.blocks) or prefix.children or prefix.snapshot)
        ):
            raise InternalError("prefix index: a prefix has another hash, or neither a block nor a child")
    n_duplicates = sum(max(0, len(blocks) - 1) for prefix in prefixes for blocks in prefix.blocks)
    if index.n_duplicates != n_duplicates:
        raise InternalError(f"prefix index: {index.n_duplicates} duplicates counted, {n_duplicates} listed")
    if any(prefix.parent is None or prefix not in prefix.parent.children for prefix in prefixes):
        raise InternalError("prefix index: blocks and their parents do not agree")


def audit_index(index: PrefixIndex, pool: BlockPool, tables: Iterable[BlockTable]) -> None:
    """Raise InternalError if the prefix cache contradicts the pool or the live tables."""
    audit_prefixes(index)
    cached = {block for block in range(pool.n_blocks) if pool.is_cached(block)}
    if cached != set(index.published()):
        raise InternalError("the cached blocks are not the published ones")
    for block in pool.free_blocks():
        if len(index.blocks_like(block)) > 1:
            raise InternalError(f"block {block} is cached although another block has its tokens")
    for table in tables:
        _audit_tokens(index, table)


def _audit_tokens(index: PrefixIndex, table: BlockTable) -> None:
    hashes = table.hashes
    for first, blocks in zip(table.firsts, table.groups, strict=True):
        for number, block in enumerate(blocks[: max(0, table.n_published - first)], first):
            tokens = index.tokens(block)
            if tokens is not None and hashes is not None and tokens != hashes.block_tokens(number):
                raise InternalError(f"block {block} is published with other tokens than its table has")
