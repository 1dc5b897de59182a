"""Recordings of an engine's steps: their format, the recorder, and the block map."""

from pyvelo.trace.blockmap import replay
from pyvelo.trace.format import read_trace

__all__ = ["read_trace", "replay"]
