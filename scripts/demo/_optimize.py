"""Optimizers of the demo model: Muon for the matrices of the blocks, AdamW for everything else.

Muon (K. Jordan, https://kellerjordan.github.io/posts/muon/): momentum whose update is made orthogonal by
five Newton-Schulz steps. Attention's matrices are cut into heads first: each is a map of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from scripts.demo._model import Tensors, learned
from scripts.demo._shape import HEAD

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's quintic


def is_matrix(name: str) -> bool:
    """Return whether Muon steps the tensor."""
    return name.startswith("blk.") and "_norm" not in name


def cut(name: str, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the maps that a matrix holds, as views."""
    if any(part in name for part in ("attn_q", "attn_k", "attn_v")):
        return list(tensor.split(HEAD, 0))
    return list(tensor.split(HEAD, 1)) if "attn_output" in name else [tensor]


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Return nearly orthogonal matrices from x [n, rows, columns]."""
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Optimizer of all tensors; `state` is what a resumed training needs."""

    def __init__(self, tensors: Tensors, muon_rate: float, adam_rate: float) -> None:
        self.tensors, self.muon_rate, self.adam_rate = tensors, muon_rate, adam_rate
        self.momentum = {name: torch.zeros_like(t) for name, t in tensors.items() if is_matrix(name)}
        self.others = [t for name, t in tensors.items() if learned(name) and not is_matrix(name)]
        self.adam = torch.optim.AdamW(
            self.others, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )

    def step(self, rate: float) -> None:
        """Take one step at `rate` times the full rates; clear the gradients."""
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * rate
        self.adam.step()
        with torch.no_grad():
            self._muon(self.muon_rate * rate)
        for tensor in self.tensors.values():
            tensor.grad = None

    def _muon(self, rate: float) -> None:
        """Step the matrices, grouped by shape."""
        alike: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for name, momentum in self.momentum.items():
            tensor = self.tensors[name]
            momentum.lerp_(tensor.grad, 1 - MOMENTUM)
            update = tensor.grad.lerp(momentum, MOMENTUM)
            for part, change in zip(cut(name, tensor), cut(name, update), strict=True):
                alike.setdefault(tuple(part.shape), []).append((part, change))
        for (rows, columns), pairs in alike.items():
            changes = orthogonal(torch.stack([change for _, change in pairs]))
            scale = rate * math.sqrt(max(1.0, rows / columns))
            for (part, _), change in zip(pairs, changes, strict=True):
                part.mul_(1 - 0.01 * rate).add_(change, alpha=-scale)

    def state(self) -> dict[str, object]:
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def restore(self, state: dict[str, object]) -> None:
        self.adam.load_state_dict(state["adam"])
        self.momentum = state["momentum"]  # type: ignore[assignment]
