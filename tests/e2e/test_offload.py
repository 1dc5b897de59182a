"""Engines with layers on devices: as many as asked for or as fit, one pool on both sides, the same tokens."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import forks

from .conftest import MakeModel

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.laboratory  # its device


@pytest.mark.parametrize("what", ["1", "2", "auto", "uneven", "several", "exhausted", "types", "kernels"])
def test_offload(tiny_model_f32: Path, what: str) -> None:
    check(tiny_model_f32, what)


def test_offload_of_recurrent_layers(make_model: MakeModel) -> None:
    check(make_model("--arch", "lfm2", "--layers", "4", "--type", "f32"), "recurrent")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("gemma3", "--layers", "7"), marks=pytest.mark.slow),
        ("gpt-oss", "--layers", "4", "--experts", "4"),
        pytest.param(("gemma4", "--layers", "7"), marks=pytest.mark.slow),
    ],
    ids=["gemma3", "gpt-oss", "gemma4"],
)
def test_offload_of_windows(make_model: MakeModel, options: tuple[str, ...]) -> None:
    check(make_model("--arch", *options, "--window", "64", "--type", "f32"), "windows")


@pytest.mark.parametrize(
    "options",
    [
        ("gemma3", "--layers", "7", "--window", "64"),
        ("gemma4", "--layers", "7", "--window", "64", "--kv-heads", "4", "--period", "3"),
        ("deci", "--layers", "5"),
    ],
    ids=["windows", "windows and other heads", "other heads and none"],
)
def test_kernels_get_a_plan_for_each_kind_of_layer(make_model: MakeModel, options: tuple[str, ...]) -> None:
    check(make_model("tiny", "--arch", *options, "--type", "f32"), "kernels")


def check(path: Path, what: str) -> None:
    done = forks.run([sys.executable, os.fspath(HERE / "offload.py"), os.fspath(path), what], text=True)
    assert done.returncode == 0, done.stderr
