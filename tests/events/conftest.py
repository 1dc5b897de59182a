"""A context of ZMQ."""

from __future__ import annotations

from .subscribers import context

__all__ = ["context"]
