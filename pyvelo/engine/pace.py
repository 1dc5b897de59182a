"""How much of a prompt a step may take while somebody listens to those that decode beside it."""

from __future__ import annotations

from pyvelo.engine.costs import running_average

__all__ = ["FEWEST", "Pace"]

SHARE = 0.7
"""Of the time of a step without prompts, what prompts may add to it: tokens come at least half as fast."""

COMFORT = 0.15
"""Seconds between tokens that still come faster than people read. Up to there, prompts may add more than
their share where many wait: the time of a step as many times as there are who wait for each who listens."""

FEWEST = 4
"""Tokens of prompts that a step takes at least, so that they get on. Deep in a context each step reads all of
it, for one token or for a few, and may take more than twice as long whatever is done."""

ROWS = 32
"""Tokens that the matrix products of a CPU take together, at most. One more costs as much as several, so a step
that is to be short ends with such a group."""

GROWTH = 1.25
"""How much longer than the last a piece may be: a step made cheap by noise must not let the next take all."""

LOOK_AGAIN = 64
"""Steps with prompts, one after the other, before one without shows again what that takes; at first fewer."""

WEIGHT = 0.3
"""Of the newest measurement in a running average."""


class Pace:
    """What steps took here, and what follows for the next one. Times are in seconds."""

    def __init__(self) -> None:
        self._alone = 0.0  # a step that only decodes
        self._per_token = 0.0  # what a token of a prompt adds to it
        self._may = FEWEST  # tokens of the next piece, before it ends with a group
        self._longest = FEWEST  # what the last piece allows the next to be
        self._since = 0  # steps with prompts since the last without
        self._patience = 1  # how many of them there may be

    def allowance(self, n_decodes: int, n_listening: int, n_waiting: int) -> int:
        """Tokens of prompts in the next step; 0 where it is to show how long one without them takes.

        Args:
            n_decodes: tokens of the step that are not of prompts.
            n_listening: those who get theirs as they come; at least 1.
            n_waiting: those whose prompts are still to be computed.
        """
        if self._alone == 0.0 or self._since >= self._patience:
            return 0
        if self._per_token == 0.0:
            return FEWEST
        fair = max(SHARE, n_waiting / n_listening) * self._alone
        seconds = min(fair, max(SHARE * self._alone, COMFORT - self._alone))
        self._may = max(FEWEST, min(self._longest, int(seconds / self._per_token)))
        whole = self._may - (n_decodes + self._may) % ROWS
        return whole if whole >= FEWEST else self._may

    def stepped(self, n_decodes: int, n_prompt_tokens: int, seconds: float) -> None:
        """A step took so long."""
        if n_decodes == 0:
            return
        if n_prompt_tokens == 0:
            # what is slow once, as the first step is, must not let prompts take as long
            self._alone = min(seconds, running_average(self._alone, seconds, WEIGHT))
            self._patience = min(LOOK_AGAIN, self._patience * 2) if self._since else self._patience
            self._since = 0
            return
        self._since += 1
        if n_prompt_tokens >= FEWEST:  # the end of a prompt may be shorter
            cut = 0 <= self._may - n_prompt_tokens < ROWS  # only to end with a group
            self._longest = int(GROWTH * (self._may if cut else n_prompt_tokens)) + 1
        if self._alone:
            # a floor, so that noise cannot make prompts seem to cost nothing
            extra = max(seconds - self._alone, 0.01 * self._alone)
            per_token = extra / n_prompt_tokens
            self._per_token = max(per_token, running_average(self._per_token, per_token, WEIGHT))
