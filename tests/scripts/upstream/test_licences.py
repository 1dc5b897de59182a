"""Licences of upstream's code: every notice of a source that is compiled is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.upstream.licences import collected, notices

SGEMM = """\
// Copyright 2024 Some Foundation
//
// Permission is hereby granted, free
// of charge

//
//   ART
"""
JSON = "// SPDX-FileCopyrightText: 2013 A Holder\n// Copyright (c) 2013 A Holder\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "LICENSE": "MIT License\n\nCopyright (c) 2023 The authors\n",
        "licenses/LICENSE-json": "MIT License\n\nCopyright (c) 2013 A Holder\n",
        "ggml/src/ggml-cpu/llamafile/sgemm.cpp": SGEMM,
        "src/llama.cpp": "int main;\n",
        "vendor/nlohmann/json.hpp": JSON,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_licences_come_whole_and_notices_once(tree: Path) -> None:
    text = collected(tree)
    assert "Copyright (c) 2023 The authors" in text
    assert "Copyright 2024 Some Foundation\n\nPermission is hereby granted, free\nof charge" in text
    assert "ART" not in text
    assert text.count("2013 A Holder") == 1


@pytest.mark.parametrize(
    "name", ["src/new.cpp", "ggml/src/ggml-cpu/deep/er.h", "ggml/src/ggml-cuda/x.cuh", "common/a.hpp"]
)
@pytest.mark.parametrize(
    "line",
    ["// Copyright (c) 2026 New Holder", " * copyright (C) 2026 New Holder  ", "# Copyright 2026 New Holder"],
)
def test_a_new_notice_is_found(tree: Path, name: str, line: str) -> None:
    before = collected(tree)
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text(f"#include <x>\n{line}\nint x;\n")
    assert notices(tree)["2026 New Holder"] == name
    assert f"2026 New Holder ({name})" in collected(tree)
    assert collected(tree) != before


def test_backends_that_are_not_built_do_not_count(tree: Path) -> None:
    before = collected(tree)
    for name in ("ggml/src/ggml-vulkan/v.cpp", "ggml/src/ggml-cpu/kleidiai/k.h", "ggml/include/ggml-sycl.h"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("// Copyright 2026 New Holder\n")
    (tree / "src" / "text.md").write_text("Copyright 2026 New Holder\n")
    assert collected(tree) == before


def test_a_licence_that_moved_is_an_error(tree: Path) -> None:
    (tree / "ggml/src/ggml-cpu/llamafile/sgemm.cpp").write_text("#include <x>\n")
    with pytest.raises(ScriptError, match="no longer begins with its licence"):
        collected(tree)


@pytest.mark.parametrize(
    "line", ["licensed under the Apache License 2.0", "SPDX-License-Identifier: GPL-3.0"]
)
def test_another_licence_is_an_error(tree: Path, line: str) -> None:
    (tree / "src/new.cpp").write_text(f"// Copyright 2026 New Holder\n// {line}\n")
    with pytest.raises(ScriptError, match=r"src/new\.cpp names another licence"):
        collected(tree)


def test_what_is_under_the_apache_license_is_named_apart(tree: Path) -> None:
    (tree / "vendor/nlohmann/json.hpp").write_text(
        JSON + "// Copyright 2018 The Abseil Authors, licensed under the Apache License 2.0\n"
        "// SPDX-License-Identifier: MIT\n// Copyright 2018 The Abseil Authors\n"
    )
    mit, _, apache = collected(tree).partition("Under the Apache License 2.0")
    assert "2018 The Abseil Authors (vendor" in apache
    assert "2018 The Abseil Authors (vendor" not in mit
