"""Names of models on the hub, and addresses of its pages."""

from __future__ import annotations

import pytest

from pyvelo.models.hub import HubName, parse_name


@pytest.mark.parametrize(
    ("text", "repo", "quant"),
    [
        ("org/repo", "org/repo", None),
        ("org/repo:Q4_K_M", "org/repo", "Q4_K_M"),
        ("hf.co/org/repo", "org/repo", None),
        ("hf.co/org/repo:Q4_K_M", "org/repo", "Q4_K_M"),
        ("https://hf.co/org/repo/", "org/repo", None),
        ("https://huggingface.co/org/repo-GGUF", "org/repo-GGUF", None),
        ("https://huggingface.co/org/repo/tree/main", "org/repo", None),
        ("https://huggingface.co/org/repo/blob/main/m-Q8_0.gguf", "org/repo", "m-Q8_0.gguf"),
        (
            "https://huggingface.co/org/repo/resolve/main/a/m-Q8_0.gguf?download=true",
            "org/repo",
            "a/m-Q8_0.gguf",
        ),
        ("https://huggingface.co/org/repo?show_file_info=m.gguf#x", "org/repo", None),
    ],
)
def test_names(text: str, repo: str, quant: str | None) -> None:
    assert parse_name(text) == HubName(repo, quant)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "repo",
        "/org/repo",
        "org/repo.gguf",
        "a/b/c",
        "hf.co/org",
        "hf.co//repo",
        "https://example.com/org/repo",
    ],
)
def test_what_is_no_name(text: str) -> None:
    assert parse_name(text) is None
