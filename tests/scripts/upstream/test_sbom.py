"""The bill of materials: each part once, with its version, and related to PyVelo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.upstream._pin import Pin
from scripts.upstream.sbom import document

PIN = Pin("some-dist", "1.2.3", "ab" * 32)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    ggml, header = tmp_path / "ggml" / "CMakeLists.txt", tmp_path / "vendor" / "nlohmann" / "json.hpp"
    for file in (ggml, header):
        file.parent.mkdir(parents=True)
    parts = list(zip(("MAJOR", "MINOR", "PATCH"), (4, 55, 666), strict=True))
    ggml.write_text("".join(f"set(GGML_VERSION_{part} {number})\n" for part, number in parts))
    header.write_text(
        "".join(f"#define NLOHMANN_JSON_VERSION_{part} {number} // x\n" for part, number in parts)
    )
    return tmp_path


def test_the_parts_and_their_versions(tree: Path) -> None:
    content = document(tree, PIN)
    versions = {each["name"]: each["versionInfo"] for each in content["packages"]}
    assert list(versions) == ["pyvelo", "llama.cpp", "ggml", "nlohmann-json", "llamafile-sgemm"]
    assert (versions["ggml"], versions["nlohmann-json"]) == ("4.55.666", "4.55.666")
    (upstream,) = (each for each in content["packages"] if each["name"] == "llama.cpp")
    assert upstream["checksums"] == [{"algorithm": "SHA256", "checksumValue": PIN.sha256}]
    assert upstream["externalRefs"][0]["referenceLocator"] == "pkg:pypi/some-dist@1.2.3"


def test_relationships_name_each_package_once(tree: Path) -> None:
    content = document(tree, PIN)
    related = [each["relatedSpdxElement"] for each in content["relationships"]]
    assert related == [each["SPDXID"] for each in content["packages"]]
    assert len(set(related)) == len(related)
    kinds = [(each["spdxElementId"], each["relationshipType"]) for each in content["relationships"]]
    assert kinds == [("SPDXRef-DOCUMENT", "DESCRIBES")] + [("SPDXRef-pyvelo", "CONTAINS")] * 4


def test_the_same_sources_give_the_same_bytes(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    first, second = document(tree, PIN), document(tree, PIN)
    assert json.dumps(first) == json.dumps(second)
    assert first["creationInfo"]["created"] == "1970-01-02T00:00:00Z"
    other = document(tree, Pin(PIN.name, "1.2.4", PIN.sha256))
    assert other["documentNamespace"] != first["documentNamespace"]


def test_a_version_that_moved_is_an_error(tree: Path) -> None:
    (tree / "ggml" / "CMakeLists.txt").write_text("set(GGML_VERSION_MAJOR 4)\n")
    with pytest.raises(ScriptError, match="does not tell its version"):
        document(tree, PIN)
