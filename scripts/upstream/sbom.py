"""Write the bill of materials of the native library: an SPDX 2.3 document in JSON.

    python scripts/upstream/sbom.py pyvelo.spdx.json

The build puts it into the wheel, in the folder sboms of its metadata (PEP 770). It names what is compiled
into the library. The texts of the licences are in LICENSES/upstream.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, ScriptError, run_main
from scripts.upstream._pin import Pin, read_pin
from scripts.upstream.fetch import locate


def numbers(file: Path, pattern: str) -> str:
    """Return the version in a file of upstream: `pattern` finds MAJOR, MINOR and PATCH."""
    text = file.read_text(encoding="utf-8")
    found = [re.search(pattern.format(part), text) for part in ("MAJOR", "MINOR", "PATCH")]
    if not all(found):
        raise ScriptError(f"{file} does not tell its version as {pattern!r}: look how it does now")
    return ".".join(match[1] for match in found if match)


def package(name: str, version: str, **more: Any) -> dict[str, Any]:
    """Return a package of the document. Its licence is MIT, which licences.py checks, or told by `more`."""
    described = {
        "SPDXID": f"SPDXRef-{name}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "MIT",
        "licenseDeclared": "MIT",
        "copyrightText": "NOASSERTION",
    }
    return described | more


def packages(tree: Path, pin: Pin) -> list[dict[str, Any]]:
    """Return PyVelo, then what its library is made of, for upstream's tree."""
    own = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    if own is None:
        raise ScriptError("pyproject.toml has no line 'version = …'")
    inside = f"within {pin.name} {pin.version}"
    archive = {
        "checksums": [{"algorithm": "SHA256", "checksumValue": pin.sha256}],
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": f"pkg:pypi/{pin.name}@{pin.version}",
            }
        ],
        "comment": "The source distribution contains llama.cpp, to which vendor/patches are applied.",
    }
    licence = "MIT AND Apache-2.0"  # of a part of nlohmann-json
    with_abseil = {"licenseConcluded": licence, "licenseDeclared": licence}
    ggml = numbers(tree / "ggml" / "CMakeLists.txt", r"set\(GGML_VERSION_{} (\d+)\)")
    json_lib = numbers(tree / "vendor" / "nlohmann" / "json.hpp", r"#define NLOHMANN_JSON_VERSION_{} (\d+)")
    return [
        package("pyvelo", own[1], **with_abseil),
        package("llama.cpp", inside, **archive),
        package("ggml", ggml),
        package("nlohmann-json", json_lib, **with_abseil),
        package("llamafile-sgemm", inside),
    ]


def document(tree: Path, pin: Pin) -> dict[str, Any]:
    """Return the SPDX document. Its time is SOURCE_DATE_EPOCH's, if that is set."""
    described = packages(tree, pin)
    own, *parts = (each["SPDXID"] for each in described)
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    made = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
    contains = [
        {"spdxElementId": own, "relationshipType": "CONTAINS", "relatedSpdxElement": part} for part in parts
    ]
    describes = {
        "spdxElementId": "SPDXRef-DOCUMENT",
        "relationshipType": "DESCRIBES",
        "relatedSpdxElement": own,
    }
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": "pyvelo",
        "documentNamespace": f"https://spdx.org/spdxdocs/pyvelo-{digest}",
        "creationInfo": {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", made),
            "creators": ["Tool: pyvelo-sbom"],
        },
        "packages": described,
        "relationships": [describes, *contains],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--tree", type=Path, help="llama.cpp's sources; default: the pinned ones")
    given = parser.parse_args()
    pin = read_pin()
    content = document(given.tree or locate(pin).path, pin)
    given.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
