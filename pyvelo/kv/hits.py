"""Check of published prefixes: whether a sequence can continue after them."""

from __future__ import annotations

from operator import ge

from pyvelo.kv.prefix import BlockLayout, Prefix

__all__ = ["Hits"]


class Hits:
    """Check of prefixes. It visits each prefix once, so it is valid until the index changes."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._needed: dict[int, tuple[int, ...]] = {}
        """Blocks in a row that a hit needs in each group, by its number of blocks."""
        self._rows: dict[Prefix, tuple[int, ...]] = {}
        """Number of a prefix's blocks; then the blocks in a row up to its end, in each group."""

    def is_hit(self, prefix: Prefix) -> bool:
        """Return whether each group has the blocks of its window, and the recurrent layers a snapshot."""
        if self._layout.state_blocks and not prefix.snapshot:
            return False
        n_blocks, *rows = self._rows_of(prefix)
        needed = self._needed.get(n_blocks)
        if needed is None:
            firsts = self._layout.first_blocks(n_blocks * self._layout.block_size + 1)
            needed = self._needed[n_blocks] = tuple(n_blocks - first for first in firsts)
        return all(map(ge, rows, needed))

    def _rows_of(self, prefix: Prefix) -> tuple[int, ...]:
        """Return the blocks in a row of a prefix, and note them for it and for all prefixes before it."""
        way, known = list[Prefix](), self._rows.get(prefix)
        while known is None:
            if prefix.parent is None:
                known = (0,) * (1 + self._layout.n_groups)
            else:
                way.append(prefix)
                prefix = prefix.parent
                known = self._rows.get(prefix)
        for each in reversed(way):
            rows = (n + 1 if blocks else 0 for n, blocks in zip(known[1:], each.blocks, strict=True))
            known = self._rows[each] = (known[0] + 1, *rows)
        return known
