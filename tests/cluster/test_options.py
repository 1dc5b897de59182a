"""Options of a cluster: the command line, the fields of a config file, and their errors."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from pyvelo.cluster.options import Options, arguments_of, parse
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import ConfigError

ROOT = Path(__file__).parents[2]


def parsed(*arguments: str) -> Options:
    found = parse(arguments)
    assert isinstance(found, Options)
    return found


def test_defaults_fit_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parsed("--replicas", "3")
    assert (found.config.model, found.replicas, found.autoscale) == (str(DEMO_MODEL), 3, None)
    assert found.config.memory_utilization == pytest.approx(0.3)
    assert found.cpus == found.config.n_threads
    assert found.settings.local
    assert not found.settings.page
    assert found.router == {"policy": "affinity"}
    assert parsed("--autoscale", "2:9").config.memory_utilization == pytest.approx(0.1)


def test_the_options_of_the_server_and_the_engine_are_taken() -> None:
    found = parsed(
        *("model.gguf", "--kv-cache-bytes", "64M", "--kv-type", "q8_0", "--ctx", "4096", "--deterministic"),
        *("--model-name", "a", "--model-name", "b", "--max-queue", "7", "--threads", "2", "--cpus", "0.5"),
        *("--autoscale", "1:4", "--slack", "2", "--factor", "1.5", "--host", "0.0.0.0", "--insecure"),
    )
    assert (found.config.model, found.config.kv_cache_bytes, found.config.n_ctx) == (
        *("model.gguf", 64 << 20),
        4096,
    )
    assert found.config.deterministic
    assert (found.settings.model_names, found.settings.max_queue) == (("a", "b"), 7)
    assert (found.autoscale, found.cpus, found.config.n_threads) == ((1, 4), 0.5, 2)
    assert found.router == {"policy": "affinity", "slack": 2, "factor": 1.5}
    assert not found.settings.local


def test_the_fields_of_a_config_file_are_options() -> None:
    fields = {
        "model": "model.gguf",
        "replicas": 2,
        "kv_cache_bytes": "64M",
        "model_name": ["a", "b"],
        "deterministic": True,
        "insecure": "true",
        "vllm_metrics": False,
        "chat_template": None,
        "host": "0.0.0.0",
    }
    found = parse(arguments_of(fields))
    assert isinstance(found, Options)
    assert (found.replicas, found.config.kv_cache_bytes, found.config.deterministic) == (2, 64 << 20, True)
    assert (found.settings.model_names, found.settings.vllm_metrics) == (("a", "b"), False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--autoscale", "4:1"), "--autoscale '4:1': give the least and the most replicas"),
        (("--autoscale", "x"), "--autoscale 'x'"),
        (("--host", "0.0.0.0"), "other machines could use a server without API keys"),
        (("--policy", "random"), "policy='random': choose from affinity"),
        (("--policy", "round-robin", "--slack", "3"), "--slack is an option of --policy affinity"),
        (("--factor", "0.5"), "--factor 0.5: give a number from 1 to 1e+06"),
        (("--factor", "nan"), "--factor nan: give a number from 1 to 1e+06"),
        (("--slack", "0"), "--slack 0: give at least 1"),
        (("--block-size", "33"), "block_size=33"),
        (("--model-name", ""), "--model-name"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(arguments)
    assert message in str(error.value)


def told(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pyvelo.cluster.ray", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stdout or "--help" in arguments
    return done.returncode, done.stderr


def has_ray() -> bool:
    import importlib.util

    return importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(has_ray(), reason="Ray is installed")
def test_without_ray_the_error_says_how_to_install_it() -> None:
    assert told("--replicas", "2") == (1, "pyvelo: a cluster needs ray: pip install 'pyvelo[ray]'\n")


@pytest.mark.skipif(not has_ray(), reason="needs pip install 'ray[serve]'")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--replicas", "0"), 2, "--replicas"),
        (("--frobnicate",), 2, "pyvelo: No such option"),
        (("nowhere.gguf",), 1, "nowhere.gguf"),
        (("--autoscale", "4:1"), 2, "pyvelo: --autoscale '4:1'"),
        (("--block-size", "33"), 2, "pyvelo: --block-size 33"),
        (("--factor", "0.5"), 2, "pyvelo: --factor 0.5: give a number from 1 to 1e+06"),
        (("--slack", "0"), 2, "pyvelo: --slack 0: give at least 1"),
    ],
)
def test_errors_are_a_line_and_a_code(arguments: tuple[str, ...], code: int, message: str) -> None:
    found, stderr = told(*arguments)
    lines = stderr.strip().splitlines()
    assert (found, len(lines)) == (code, 1), stderr
    assert message in lines[0]


@pytest.mark.skipif(not has_ray(), reason="needs pip install 'ray[serve]'")
def test_a_port_in_use_ends_the_command_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code, stderr = told("--threads", "1", "--port", str(server.getsockname()[1]))
    assert (code, len(stderr.strip().splitlines())) == (1, 1), stderr
    assert "cannot be used: Address already in use; give another --port" in stderr


@pytest.mark.skipif(not has_ray(), reason="needs pip install 'ray[serve]'")
def test_a_wrong_address_of_ray_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    code, stderr = told("--threads", "1")
    assert code == 1
    assert stderr.splitlines()[-1].startswith("pyvelo: RAY_ADDRESS='nonsense': Invalid address format")
    assert "Traceback" not in stderr


@pytest.mark.skipif(not has_ray(), reason="needs pip install 'ray[serve]'")
def test_too_many_cpus_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, stderr = told("--threads", "1", "--cpus", "8000", "--port", str(port))
    assert code == 1
    words = "pyvelo: replicas and ingresses need 8000 CPUs, and Ray has "
    assert any(line.startswith(words) for line in stderr.splitlines()), stderr
    assert "Traceback" not in stderr


@pytest.mark.skipif(not has_ray(), reason="needs pip install 'ray[serve]'")
@pytest.mark.filterwarnings("default")
def test_the_config_file_is_one_of_ray_serve() -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from pyvelo.cluster.ray import app

    content: Any = yaml.safe_load((ROOT / "examples/ray_serve.yaml").read_text(encoding="utf-8"))
    [application] = ServeDeploySchema.model_validate(content).applications
    assert application.import_path == f"{app.__module__}:{app.__name__}"
    assert type(app(application.args)).__name__ == "Application"
    for wrong in ({"frobnicate": 1}, {"replicas": "many"}):
        with pytest.raises(ConfigError, match="args: "):
            app(wrong)
