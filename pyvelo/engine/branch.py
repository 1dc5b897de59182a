"""A sequence that somebody holds between two answers: its tokens, and the K and V of the first of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pyvelo.kv.draft import BlockTable, Swapped
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.prefix import Chain

if TYPE_CHECKING:
    from pyvelo.engine.request import Request

__all__ = ["Branch", "Shelf"]


class Branch:
    """What goes on from answer to answer. While a request runs on it, `request` holds its blocks.

    A branch at rest gives its blocks up before anything that runs does; then they are moved to host memory,
    or computed again, as far as they are no hit. Once it is `dropped`, a request that still arrives for it is
    cancelled.
    """

    __slots__ = ("chain", "dropped", "request", "swapped", "table", "tokens")

    def __init__(self, tokens: Iterable[int], block_size: int, salt: str = "") -> None:
        self.tokens = array("i", tokens)
        self.chain = Chain(self.tokens, block_size, salt.encode("utf-8", "surrogatepass"))
        self.table: BlockTable | None = None
        self.swapped: Swapped | None = None
        self.request: Request | None = None
        self.dropped = False

    def fork(self, tokens: Iterable[int], n_common: int) -> Branch:
        """A branch whose first `n_common` tokens are those of this one; `Shelf.fork` shares the blocks."""
        twin = Branch(tokens, self.chain.block_size)
        twin.chain = self.chain.fork(twin.tokens, n_common)
        return twin

    @property
    def computed(self) -> bool:
        """Whether all is there but for the last token, which is computed for its logits."""
        return self.table is not None and self.table.n_tokens >= len(self.tokens) - 1

    @property
    def busy(self) -> bool:
        """Whether a request runs on it, or waits to."""
        return self.request is not None and not self.request.finished


class Shelf:
    """The branches at rest that hold blocks, the longest at rest first."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._branches: dict[int, Branch] = {}

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator[Branch]:
        return iter(self._branches.values())

    def fork(self, branch: Branch, twin: Branch) -> None:
        """Lets `twin`, whose tokens begin as those of the branch, share what the branch holds here."""
        if branch.table is not None:
            self._put(twin, self._manager.fork(branch.table, twin.chain))

    def lend(self, branch: Branch) -> None:
        """A request runs on the branch now, and has its table."""
        branch.table = None
        self._branches.pop(id(branch), None)

    def take_back(self, branch: Branch, table: BlockTable) -> None:
        """The request has ended: what it stored stays."""
        self._manager.park(table)
        self._put(branch, table)

    def evict(self, branch: Branch, swapped: Swapped | None) -> None:
        """It gave its blocks up; K and V are in host memory or lost, but for what is still a hit."""
        self.lend(branch)
        if branch.request is not None and branch.busy:
            branch.request.swapped = swapped
        else:
            branch.swapped = swapped

    def forget(self, branch: Branch) -> None:
        """Gives back what the branch holds, here and in host memory."""
        if branch.table is not None:
            self._manager.free(branch.table)
            self.lend(branch)
        swapped = self.take_swapped(branch)
        if swapped is not None:
            self._manager.discard(swapped)

    def take_swapped(self, branch: Branch) -> Swapped | None:
        """Take from the branch what it has in host memory; None if the pool was cleared since."""
        swapped, branch.swapped = branch.swapped, None
        return swapped if swapped is not None and self._manager.holds(swapped) else None

    def clear(self) -> None:
        """Empty the shelf after the pool was cleared; branches keep their tokens."""
        for branch in self._branches.values():
            branch.table = None
        self._branches.clear()

    def _put(self, branch: Branch, table: BlockTable) -> None:
        branch.table = table
        self._branches[id(branch)] = branch
