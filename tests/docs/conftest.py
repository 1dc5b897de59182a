"""One thread for the engines of the pages."""

from __future__ import annotations

from tests.cli.conftest import _one_thread_by_default

__all__ = ["_one_thread_by_default"]
