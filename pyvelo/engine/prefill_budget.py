"""Measured costs: the prefill budget of a step while requests stream, of swapping, and of snapshots."""

from __future__ import annotations

from collections import deque
from statistics import median_low

__all__ = ["FEWEST", "MANY_TOKENS", "Costs", "PrefillBudget"]

SHARE = 0.7
"""Share of a decode step's time that prefill may add to it: tokens come at least half as fast."""

COMFORT = 0.12
"""Seconds between tokens at which they still come faster than people read. Up to this time, prefill may take
up to `waiting / streaming` decode-step times of a step."""

FEWEST = 2
"""Fewest prompt tokens of a step, so that prefill advances."""

ROWS = 32
"""Most rows that a CPU's matrix products compute together. One row more costs as much as several, so a short
step ends with a full group."""

GROWTH = 1.25
"""Growth limit of a chunk over the last: a step that was fast by chance must not let the next take all."""

LOOK_AGAIN = 64
"""Most steps with prefill in a row before one without it is measured again; fewer at first."""

WEIGHT = 0.3
"""Weight of the newest measurement in a running average."""

LOOKS = 3
"""Decode steps whose median counts, so that a slow one does not raise the budget."""

UNEVEN = 1.15
"""Most that the median may exceed the newest decode step, so that the budget follows faster steps at once."""

CHANGED = 1.3
"""Ratio to the last decode step from which the next is measured soon."""

DOUBT = 4.0
"""Variance of chunk lengths, in tokens squared, at which the fitted slope has half the weight."""

FLATTEST = 0.1
"""Least slope of the fitted line, as a share of the mean cost of a token."""

COST_WEIGHT = 0.2
"""Weight of the newest measurement in the running averages of `Costs`."""


SNAPSHOT_SHARE = 0.05
"""Most time of saving a recurrent state, as a share of the time of computing the tokens before it."""


class PrefillBudget:
    """Prompt tokens that a step may take, from the times of earlier steps. Times are in seconds."""

    def __init__(self) -> None:
        self._looks: deque[float] = deque(maxlen=LOOKS)  # times of decode steps
        self._alone = 0.0  # time of a decode step
        self._line = _Line()  # time that prefill adds to it
        self._may = FEWEST  # tokens of the next chunk, before it ends with a group
        self._longest = FEWEST  # limit of the next chunk by the last
        self._since = 0  # steps with prefill since the last decode step
        self._patience = 1  # most such steps
        self._surprised = False  # the last decode step differed from before

    def tokens(self, n_decodes: int, n_streaming: int, n_waiting: int) -> int:
        """Return the prompt tokens of the next step; 0: measure a decode step.

        Args:
            n_decodes: tokens that decode; at least 1.
            n_streaming: requests that stream; at least 1.
            n_waiting: requests whose prompt is not computed.
        """
        if self._alone == 0.0 or self._since >= (1 if self._surprised else self._patience):
            return 0
        if self._line.empty:
            return FEWEST
        share, comfort = SHARE * self._alone, max(SHARE * self._alone, COMFORT - self._alone)
        n_tokens = self._line.tokens(max(share, min(comfort, n_waiting / n_streaming * self._alone)))
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
        """Note the time of a decode step. If it differs from before, measure another one soon."""
        before = self._alone
        self._looks.append(seconds)
        self._alone = min(median_low(self._looks), UNEVEN * seconds)
        if self._since:
            self._surprised = seconds > CHANGED * before or self._alone < before / UNEVEN
            if not self._surprised:
                self._patience = min(LOOK_AGAIN, self._patience * 2)
        self._since = 0


class _Line:
    """Line of seconds over the tokens of a chunk: a constant, such as reading the context, and a slope.

    Fitted by least squares over the latest chunks; if their lengths are equal, close to a line through zero.
    """

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
        """Return the tokens that take so long; 0 or less: none."""
        through_zero = self._seconds / self._tokens
        slope = (self._covariance + DOUBT * through_zero) / (self._variance + DOUBT)
        slope = min(max(slope, FLATTEST * through_zero), through_zero)
        n_tokens = int(self._tokens + (seconds - self._seconds) / slope)
        # if all chunks were as long, only a longer one shows the constant part
        return max(n_tokens, round(self._tokens) + 1) if seconds > self._seconds else n_tokens


MANY_TOKENS = 32
"""Fewest tokens of a step that measures the cost of a prompt token."""


class Costs:
    """Running averages of the costs of swapping and computing; until both are known, swapping is favoured."""

    def __init__(self) -> None:
        self._per_block = 0.0  # seconds to move one between pool and host memory
        self._per_token = 0.0  # seconds to compute one of a prompt
        self._per_state = 0.0  # seconds to save a recurrent state

    def moved(self, n_blocks: int, seconds: float) -> None:
        """Note the time of moving blocks one way."""
        self._per_block = _running_average(self._per_block, seconds / n_blocks, COST_WEIGHT)

    def computed(self, n_tokens: int, seconds: float) -> None:
        """Note the time of a step of many tokens."""
        self._per_token = _running_average(self._per_token, seconds / n_tokens, COST_WEIGHT)

    def seconds_for(self, n_tokens: int) -> float:
        """Return the time of computing tokens of a prompt; 0: unknown."""
        return n_tokens * self._per_token

    def saved(self, seconds: float) -> None:
        """Note the time of saving a recurrent state in blocks."""
        self._per_state = _running_average(self._per_state, seconds, COST_WEIGHT)

    def favour_snapshot(self, n_tokens: int) -> bool:
        """Return whether saving a recurrent state costs little beside computing `n_tokens` tokens."""
        return self._per_state <= SNAPSHOT_SHARE * n_tokens * self._per_token or not self._per_token

    def favour_swap(self, n_blocks: int, n_tokens: int) -> bool:
        """Return whether swapping a sequence out and in costs less than computing it again."""
        return not self._per_token or 2 * n_blocks * self._per_block <= n_tokens * self._per_token


def _running_average(before: float, now: float, weight: float) -> float:
    """Return the average with the newest measurement; `before` is 0 at the first."""
    return now if before == 0.0 else before + weight * (now - before)
