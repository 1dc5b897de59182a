"""Fixtures: the server whose answers a batch must have."""

from __future__ import annotations

from tests.server.conftest import server

__all__ = ["server"]
