"""What steps cost here, and what follows: how much of a prompt a step may take while a request streams, and
whether a preempted sequence is swapped out or computed again."""

from __future__ import annotations

from collections import deque
from statistics import median_low

__all__ = ["FEWEST", "Costs", "PrefillBudget"]

SHARE = 0.7
"""Of the time of a step without prompts, what prompts may add to it: tokens come at least half as fast."""

COMFORT = 0.12
"""Seconds between tokens that still come faster than people read. Up to there, prompts may add more than
their share where many wait: the time of a step as many times as there are who wait for each who listens."""

FEWEST = 2
"""Tokens of prompts that a step takes at least, so that they get on."""

ROWS = 32
"""Tokens that the matrix products of a CPU take together, at most. One more costs as much as several, so a
step that is to be short ends with such a group."""

GROWTH = 1.25
"""How much longer than the last a piece may be: a step made cheap by noise must not let the next take all."""

LOOK_AGAIN = 64
"""Steps with prompts, one after the other, before one without shows again what that takes; at first fewer."""

WEIGHT = 0.3
"""Of the newest measurement in a running average."""

LOOKS = 3
"""Steps without prompts whose middle one counts, so that one that was slow makes no room for prompts."""

UNEVEN = 1.15
"""How much longer than the newest of them a step without prompts is taken to be at most: steps that became
quick are believed at once."""

CHANGED = 1.3
"""How much longer than before a step without prompts takes that the next is looked at soon for."""

DOUBT = 4.0
"""Variance of the lengths of pieces, in tokens squared, at which a line through them is half believed."""

FLATTEST = 0.1
"""Of what tokens cost on the average, what one more may seem to cost at least."""

COST_WEIGHT = 0.2
"""Of the newest measurement in the running averages of `Costs`."""


class PrefillBudget:
    """What steps took here, and what follows for the next one. Times are in seconds."""

    def __init__(self) -> None:
        self._looks: deque[float] = deque(maxlen=LOOKS)  # what steps without prompts took
        self._alone = 0.0  # such a step now
        self._line = _Line()  # what prompts add to it
        self._may = FEWEST  # tokens of the next piece, before it ends with a group
        self._longest = FEWEST  # what the last piece allows the next to be
        self._since = 0  # steps with prompts since the last without
        self._patience = 1  # how many of them there may be
        self._surprised = False  # the last step without was not as before: is it so?

    def tokens(self, n_decodes: int, n_listening: int, n_waiting: int) -> int:
        """Tokens of prompts in the next step; 0 where it is to show how long one without them takes.

        Args:
            n_decodes: tokens of the step that are not of prompts; at least 1, or nobody is kept from a token.
            n_listening: those who get theirs as they come; at least 1.
            n_waiting: those whose prompts are still to be computed.
        """
        if self._alone == 0.0 or self._since >= (1 if self._surprised else self._patience):
            return 0
        if self._line.empty:
            return FEWEST
        share, comfort = SHARE * self._alone, max(SHARE * self._alone, COMFORT - self._alone)
        n_tokens = self._line.tokens(max(share, min(comfort, n_waiting / n_listening * self._alone)))
        self._may = max(FEWEST, min(self._longest, n_tokens))
        whole = self._may - (n_decodes + self._may) % ROWS
        return whole if whole >= FEWEST else self._may

    def stepped(self, n_prompt_tokens: int, seconds: float) -> None:
        """Note the time of a step with decodes."""
        if n_prompt_tokens == 0:
            self._look(seconds)
            return
        self._since += 1
        if n_prompt_tokens >= FEWEST:  # the end of a prompt may be shorter
            cut = 0 <= self._may - n_prompt_tokens < ROWS  # only to end with a group
            self._longest = int(GROWTH * (self._may if cut else n_prompt_tokens)) + 1
        if self._alone:
            # a floor, so that noise cannot make prompts seem to cost nothing
            self._line.add(n_prompt_tokens, max(seconds - self._alone, 0.01 * self._alone))

    def _look(self, seconds: float) -> None:
        """A step without prompts. Where it took longer, or less, the next but one is such a step, too."""
        before = self._alone
        self._looks.append(seconds)
        self._alone = min(median_low(self._looks), UNEVEN * seconds)
        if self._since:
            self._surprised = seconds > CHANGED * before or self._alone < before / UNEVEN
            if not self._surprised:
                self._patience = min(LOOK_AGAIN, self._patience * 2)
        self._since = 0


class _Line:
    """Seconds over tokens: a part that any piece costs, such as reading the context, and one for each token.
    By least squares over the latest pieces, drawn towards a line through zero where they were all as long."""

    def __init__(self) -> None:
        self.empty = True
        self._tokens = self._seconds = 0.0  # means
        self._variance = self._covariance = 0.0

    def add(self, n_tokens: int, seconds: float) -> None:
        weight = 1.0 if self.empty else WEIGHT
        self.empty = False
        tokens_off, seconds_off = n_tokens - self._tokens, seconds - self._seconds
        self._tokens += weight * tokens_off
        self._seconds += weight * seconds_off
        self._variance = (1 - weight) * (self._variance + weight * tokens_off**2)
        self._covariance = (1 - weight) * (self._covariance + weight * tokens_off * seconds_off)

    def tokens(self, seconds: float) -> int:
        """How many take so long; 0 and less where none do."""
        through_zero = self._seconds / self._tokens
        slope = (self._covariance + DOUBT * through_zero) / (self._variance + DOUBT)
        slope = min(max(slope, FLATTEST * through_zero), through_zero)
        n_tokens = int(self._tokens + (seconds - self._seconds) / slope)
        # where pieces were all as long, only a longer one shows that most of their time is not its tokens'
        return max(n_tokens, round(self._tokens) + 1) if seconds > self._seconds else n_tokens


class Costs:
    """Running averages of what was measured here; until both are known, moving is taken to be cheaper."""

    def __init__(self) -> None:
        self._per_block = 0.0  # seconds to move one between pool and host memory
        self._per_token = 0.0  # seconds to compute one of a prompt

    def moved(self, n_blocks: int, seconds: float) -> None:
        """That many blocks were moved one way."""
        self._per_block = _running_average(self._per_block, seconds / n_blocks, COST_WEIGHT)

    def computed(self, n_tokens: int, seconds: float) -> None:
        """A step of many tokens took so long."""
        self._per_token = _running_average(self._per_token, seconds / n_tokens, COST_WEIGHT)

    def favour_swap(self, n_blocks: int, n_tokens: int) -> bool:
        """Whether a sequence is better moved out and back than computed again."""
        return not self._per_token or 2 * n_blocks * self._per_block <= n_tokens * self._per_token


def _running_average(before: float, now: float, weight: float) -> float:
    """With the newest measurement; `before` is 0 where it is the first."""
    return now if before == 0.0 else before + weight * (now - before)
