"""Sampler: the choice of the next token of one sequence."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import ClosedError, ConfigError
from ._ffi import check, created, ffi, int32, ints, lib
from .model import Model, token_array

if TYPE_CHECKING:
    from ._velo import CData

__all__ = ["Sampler"]


class Sampler:
    """Sampler of one sequence, which remembers its tokens. For one thread at a time.

    The order is mask, bias, penalties, temperature, top-k, top-p, min-p, sample. Equal seeds give equal
    tokens for equal logits.

    Args:
        model: the model of the logits.
        temperature: 0 selects the most likely token, and the lowest id of equal ones.
        top_k: sample from this number of most likely tokens; 0: from all.
        top_p: sample from the most likely tokens with this probability in total; 1: from all.
        min_p: exclude tokens less likely than this share of the most likely one.
        repetition_penalty: above 1, tokens of prompt and output become less likely.
        presence_penalty: subtracted from the logit of a token of the output.
        frequency_penalty: subtracted once for each time that the token is in the output.
        seed: of the random numbers, 64 bits.
        logit_bias: added to the logits of tokens; -inf bans one.

    Raises:
        ConfigError: a value is out of range, or a token not in the vocabulary.
        ClosedError: the model was closed.
    """

    def __init__(
        self,
        model: Model,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int,
        logit_bias: Mapping[int, float] | None = None,
    ) -> None:
        self.handle: CData | None = None
        """The C handle, None when closed."""
        number = operator.index(seed)
        if not 0 <= number < 2**64:
            raise ConfigError(f"seed is {number}, but must be from 0 to 2**64 - 1")
        params = ffi.new("velo_sampler_params *")
        params.temperature = temperature
        params.top_k = int32("top_k", top_k)
        params.top_p = top_p
        params.min_p = min_p
        params.repetition_penalty = repetition_penalty
        params.presence_penalty = presence_penalty
        params.frequency_penalty = frequency_penalty
        params.seed = number
        bias = dict(logit_bias or {})
        tokens = ffi.new("int32_t[]", [int32("a token of logit_bias", token) for token in bias])
        values = ffi.new("float[]", list(bias.values()))
        params.n_bias, params.bias_tokens, params.bias_values = len(bias), tokens, values
        out = ffi.new("velo_sampler **")
        status = lib.velo_sampler_create(model.handle, params, out)
        self.handle = created(status, out, lib.velo_sampler_free)

    def see_prompt(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Add tokens that it did not sample, for the repetition penalty.

        Raises:
            ConfigError: a token is not in the vocabulary.
            ClosedError: the sampler was closed.
        """
        handle = self.handle
        if handle is None:
            raise ClosedError("the sampler was closed")
        array = token_array(tokens)
        check(lib.velo_sampler_prompt(handle, ints(array), len(array)))

    def mask(self, bits: bytes) -> None:
        """Set the tokens that it may sample until the next call.

        Args:
            bits: bit t % 8 of byte t // 8 for token t, at least one for each token of the vocabulary; empty:
                every token.

        Raises:
            ConfigError: `bits` is too short.
            ClosedError: the sampler was closed.
        """
        handle = self.handle
        if handle is None:
            raise ClosedError("the sampler was closed")
        check(lib.velo_sampler_mask(handle, ffi.from_buffer("uint8_t[]", bits), len(bits)))

    def close(self) -> None:
        """Free the sampler. May be called again."""
        self.handle = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
