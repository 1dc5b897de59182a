"""Tests of the attention operator, over the laboratory library."""
