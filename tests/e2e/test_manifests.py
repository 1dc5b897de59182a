"""Manifests in examples/ against the schemas of Compose and Kubernetes, and against the server's options."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from pyvelo.cli.app import execute

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples/kubernetes").glob("*.yaml"))
COMPOSE = ROOT / "examples/compose.yaml"
VERSIONS = ("1.30", "1.37")


def documents() -> Iterator[Any]:
    for file in FILES:
        yield from yaml.safe_load_all(file.read_text(encoding="utf-8"))


def one(kind: str, name: str) -> Any:
    [found] = [doc for doc in documents() if (doc["kind"], doc["metadata"]["name"]) == (kind, name)]
    return found


def drain_of(arguments: list[str]) -> float:
    [seconds] = [float(a.removeprefix("--drain=")) for a in arguments if a.startswith("--drain=")]
    return seconds


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_each_document(version: str) -> None:
    kinds = []
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)
        kinds.append(document["kind"])
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= set(kinds)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**one("Deployment", "pyvelo"), "spec": {"replica": 2}}, version, strict=True
        )


def test_a_drain_ends_before_the_grace_period() -> None:
    pod = one("Deployment", "pyvelo")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause + drain_of(container["args"]) + 5 <= pod["terminationGracePeriodSeconds"]
    ready = container["readinessProbe"]
    assert ready["periodSeconds"] * ready["failureThreshold"] <= pause, (
        "routers know before new requests get 503"
    )
    for probe in ("readinessProbe", "startupProbe"):
        assert container[probe]["httpGet"]["path"] == "/health"


def test_services_and_policies_select_the_pods_and_their_ports() -> None:
    for name in ("pyvelo", "pyvelo-valkey"):
        deployment = one("Deployment", name)["spec"]
        labels = deployment["template"]["metadata"]["labels"]
        assert deployment["selector"]["matchLabels"] == labels
        ports = {port["name"] for port in deployment["template"]["spec"]["containers"][0]["ports"]}
        for document in documents():
            if document["kind"] == "Service" and document["spec"]["selector"] == labels:
                assert {port["targetPort"] for port in document["spec"]["ports"]} <= ports
    assert one("PodDisruptionBudget", "pyvelo")["spec"]["selector"]["matchLabels"] == {"app": "pyvelo"}


@pytest.mark.parametrize("place", ["kubernetes", "compose"])
def test_the_server_takes_the_options(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All options are known and valid: the error is of the model, which is missing."""
    if place == "compose":
        arguments = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]["one"]["command"]
    else:
        pod = one("Deployment", "pyvelo")["spec"]["template"]["spec"]
        arguments = pod["containers"][0]["args"]
    given = [re.sub(r":555[78]$", ":*", re.sub(r"\$\{[^}]*\}", "x.gguf", each)) for each in arguments]
    assert execute(["serve", "--port", "0", *given]) == 1
    assert f"{given[0]}" in capsys.readouterr().err


def test_compose_accepts_the_file() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(COMPOSE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    server = services["one"]
    assert services["two"] == server
    assert drain_of(server["command"]) + 5 <= float(server["stop_grace_period"].removesuffix("s"))


def test_the_router_of_compose_has_the_configuration_of_the_example(tmp_path: Path) -> None:
    router = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]["router"]
    script = router["command"][0].partition(" && ")[0]
    words = shlex.split(script)
    source, target = words[-3], words[-1]
    assert source in router["volumes"][0]
    config = ROOT / "examples/routers/haproxy.cfg"
    words = [str(config) if word == source else word for word in words[: words.index(">")]]
    made = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert target in router["command"][0].partition(" && ")[2]
    assert re.findall(r"^ +(?:server \w+|bind) (\S+)", made, re.MULTILINE) == [
        ":8080",
        "one:8000",
        "two:8000",
    ]
    if (haproxy := shutil.which("haproxy", path="/usr/sbin:/usr/bin")) is None:
        pytest.skip("haproxy is not installed")
    file = tmp_path / "haproxy.cfg"  # with addresses that this machine can look up
    file.write_text(re.sub(r"(one|two):8000", "127.0.0.1:8000", made), encoding="utf-8")
    done = subprocess.run([haproxy, "-c", "-f", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
