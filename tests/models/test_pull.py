"""`pyvelo pull`, `pyvelo list` and models by name, against a hub on loopback."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import Shell
from .server import Hub, Repo

pytest.importorskip("huggingface_hub")


def test_one_model_needs_no_tag(shell: Shell, hub: Hub, tiny_model: Path) -> None:
    code, out, err = shell.run("pull", "org/one")
    path = Path(out.strip())
    assert code == 0, err
    assert path.read_bytes() == tiny_model.read_bytes()
    assert path.name == "tiny-Q8_0.gguf"
    assert shell.home in path.parents
    assert err.startswith("pyvelo: org/one:Q8_0, ")
    assert err.count("\n") == 1  # no bar without a terminal
    assert [file for file, _ in hub.downloads()] == ["tiny-Q8_0.gguf"]
    assert shell.parts() == []


def test_pulling_again_downloads_nothing(shell: Shell, hub: Hub) -> None:
    shell.run("pull", "org/one")
    code, out, err = shell.run("pull", "org/one:q8_0", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["was_cached"] is True
    assert (report["repo"], report["tag"], report["files"]) == ("org/one", "Q8_0", [report["path"]])
    assert len(hub.downloads()) == 1


def test_a_choice_is_shown_with_sizes(shell: Shell, hub: Hub) -> None:
    code, out, err = shell.run("pull", "org/choice")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "UD-Q2_K_XL (0.0 MiB), Q8_0 (" in err
    assert "Q4_K_M (" in err
    assert "Name one, as in org/choice:" in err
    code, out, err = shell.run("pull", "org/choice:Q5_0", "--json")
    report = json.loads(out)
    assert (code, err) == (1, "")
    assert [choice["name"] for choice in report["choices"]] == ["UD-Q2_K_XL", "Q8_0", "Q4_K_M"]
    assert "Q5_0 is none of its models" in report["error"]
    assert hub.downloads() == []


@pytest.mark.parametrize("tag", ["Q4_K_M", "q4_k_m", "tiny-Q4_K_M.gguf", "tiny-q4_k_m"])
def test_a_tag_or_a_file_names_one(shell: Shell, hub: Hub, tag: str) -> None:
    code, out, err = shell.run("pull", f"org/choice:{tag}")
    assert code == 0, err
    assert out.strip().endswith("tiny-Q4_K_M.gguf")
    assert [file for file, _ in hub.downloads()] == ["tiny-Q4_K_M.gguf"]


def test_list(shell: Shell) -> None:
    assert shell.run("list") == (0, "", "pyvelo: no model is cached: pyvelo pull ORG/REPO:QUANT brings one\n")
    assert json.loads(shell.run("list", "--json")[1]) == {"models": []}
    paths = [shell.run("pull", name)[1].strip() for name in ("org/one", "org/choice:Q4_K_M")]
    code, out, err = shell.run("list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 3
    assert "org/choice:Q4_K_M" in lines[1]
    assert paths[1] in lines[1]
    assert paths[0] in lines[2]
    models = json.loads(shell.run("list", "--json")[1])["models"]
    assert [model["name"] for model in models] == ["org/choice:Q4_K_M", "org/one:Q8_0"]
    assert [model["path"] for model in models] == paths[::-1]
    assert models[1]["bytes"] == Path(paths[0]).stat().st_size


def test_a_name_runs_from_the_cache_alone(shell: Shell, hub: Hub) -> None:
    shell.run("pull", "org/choice:Q8_0")
    asked = len(hub.requests)
    for name in ("org/choice:Q8_0", "org/choice"):  # the only one that is cached
        code, out, err = shell.run("run", name, "-p", "Once", "-n", "4", HF_HUB_OFFLINE="1")
        assert (code, err) == (0, "")
        assert len(out.split()) >= 2
    code, out, _ = shell.run("info", "org/choice:Q8_0", "--json")
    assert json.loads(out)["model"]["architecture"] == "llama"
    assert len(hub.requests) == asked
    shell.run("pull", "org/choice:Q4_K_M")
    code, out, err = shell.run("run", "org/choice", "-p", "Once")
    assert (code, out) == (1, "")
    assert "the cache has Q8_0 (" in err


def test_the_python_interface_downloads_what_is_not_there(shell: Shell, hub: Hub, tiny_model: Path) -> None:
    code = (
        "from pyvelo import LLM, SamplingParams\n"
        "with LLM({model!r}) as llm:\n"
        "    print(llm.generate('Once', SamplingParams(max_tokens=6, temperature=0))[0].token_ids)\n"
    )
    by_name = shell.python(code.format(model="org/one:Q8_0"))
    assert by_name == shell.python(code.format(model=str(tiny_model)))
    assert len(hub.downloads()) == 1


def test_offline_what_is_not_cached_is_not_asked_for(shell: Shell, hub: Hub) -> None:
    for command in (["pull", "org/one"], ["run", "org/one", "-p", "x"]):
        code, out, err = shell.run(*command, HF_HUB_OFFLINE="1")
        assert (code, out) == (1, "")
        assert err == "pyvelo: org/one is not in the cache, and HF_HUB_OFFLINE forbids to ask the hub\n"
    assert hub.requests == []
    shell.run("pull", "org/one")
    code, out, _ = shell.run("pull", "org/one", "--json", HF_HUB_OFFLINE="1")
    assert (code, json.loads(out)["was_cached"]) == (0, True)


def test_a_token_is_sent_and_its_absence_told(shell: Shell, hub: Hub) -> None:
    hub.repos["org/private"] = Repo(hub.repos["org/one"].files, token="secret")
    code, out, err = shell.run("pull", "org/private")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "it is private" in err
    assert "HF_TOKEN" in err
    assert shell.run("pull", "org/private", HF_TOKEN="secret")[0] == 0
    hub.repos["org/gated"] = Repo(hub.repos["org/one"].files, gated=True)
    code, out, err = shell.run("pull", "org/gated")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "accepted its terms" in err


def test_split_models_are_pulled_whole(shell: Shell, hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    from tests.models.test_gguf_parts import split

    parts = split(tiny_model, tmp_path)
    files = {f"Q8_0/tiny-Q8_0-{part.name.removeprefix('model-')}": part.read_bytes() for part in parts}
    hub.repos["org/split"] = Repo({**files, "tiny-F16-00001-of-00002.gguf": b"the other is missing"})
    code, out, err = shell.run("pull", "org/split:Q8_0", "--json")
    report = json.loads(out)
    assert code == 0, err
    assert [Path(file).name for file in report["files"]] == [Path(name).name for name in files]
    assert report["bytes"] == sum(map(len, files.values()))
    code, out, err = shell.run("run", "org/split:Q8_0", "-p", "Once", "-n", "4", "--json")
    assert code == 0, err
    assert len(json.loads(out)["token_ids"]) == 4
    code, out, err = shell.run("pull", "org/split:F16")
    assert (code, out) == (1, "")
    assert "1 of the parts" in err


def test_models_of_one_type_are_named_by_file(shell: Shell, hub: Hub, tiny_model: Path) -> None:
    model = tiny_model.read_bytes()
    hub.repos["org/twins"] = Repo({"a-Q8_0.gguf": model, "b-Q8_0.gguf": model + bytes(32)})
    code, out, err = shell.run("pull", "org/twins:Q8_0")
    assert (code, out) == (1, "")
    assert "2 models go by that name" in err
    assert "as in org/twins:a-Q8_0.gguf" in err
    for name in ("a-Q8_0.gguf", "b-Q8_0"):
        assert shell.run("pull", f"org/twins:{name}")[0] == 0
    names = [model["name"] for model in json.loads(shell.run("list", "--json")[1])["models"]]
    assert names == ["org/twins:a-Q8_0.gguf", "org/twins:b-Q8_0.gguf"]
    assert shell.run("run", names[1], "-p", "Once", "-n", "1", HF_HUB_OFFLINE="1")[0] == 0


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no such terminals here")
def test_a_terminal_sees_a_bar(shell: Shell) -> None:
    import fcntl
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "pyvelo.cli", "pull", "org/one"],
        env={**shell.environment, "TERM": "xterm"},
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    assert process.wait(60) == 0
    assert "tiny-Q8_0.gguf: 100%" in os.read(ours, 1 << 16).decode()
    os.close(ours)


# ---- failures ----


@pytest.fixture
def large(hub: Hub) -> bytes:
    """Return content that the library writes in several pieces."""
    data = random.Random(1).randbytes(13 << 20)
    hub.repos["org/large"] = Repo({"large-Q8_0.gguf": data})
    return data


def interrupt(shell: Shell, hub: Hub) -> Path:
    """Pull org/large, send Ctrl+C after most of it, and return the part that is left."""
    hub.stop_after = 12 << 20
    process = shell.start("pull", "org/large")
    deadline = time.monotonic() + 60
    while not any(part.stat().st_size >= 10 << 20 for part in shell.parts()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) in ((130, "", ""), (-signal.SIGINT, "", ""))
    hub.stop_after = None
    (part,) = shell.parts()
    return part


def test_ctrl_c_leaves_what_has_come_and_a_second_pull_goes_on(shell: Shell, hub: Hub, large: bytes) -> None:
    have = interrupt(shell, hub).stat().st_size
    assert 10 << 20 <= have < len(large)
    code, out, err = shell.run("pull", "org/large")
    assert code == 0, err
    assert hub.downloads() == [("large-Q8_0.gguf", None), ("large-Q8_0.gguf", f"bytes={have}-")]
    assert Path(out.strip()).read_bytes() == large
    assert shell.parts() == []


def test_a_server_without_ranges_sends_all_of_it(shell: Shell, hub: Hub, large: bytes) -> None:
    interrupt(shell, hub)
    hub.ranges = False
    code, out, err = shell.run("pull", "org/large")
    assert code == 0, err
    assert Path(out.strip()).read_bytes() == large


def test_a_part_that_is_not_of_the_file_is_noticed(shell: Shell, hub: Hub, large: bytes) -> None:
    part = interrupt(shell, hub)
    part.write_bytes(bytes(part.stat().st_size))
    code, out, err = shell.run("pull", "org/large")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "is damaged and was removed" in err
    assert shell.parts() == []
    assert shell.run("pull", "org/large")[0] == 0


def test_content_that_is_not_what_its_hash_says(shell: Shell, hub: Hub) -> None:
    hub.honest = False
    code, out, err = shell.run("pull", "org/one")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "tiny-Q8_0.gguf is damaged and was removed" in err
    assert json.loads(shell.run("list", "--json")[1]) == {"models": []}


def test_names_that_lead_nowhere_are_one_line(shell: Shell, hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/none"] = Repo({"README.md": b"no model"})
    for complaint, arguments in {
        "no repository org/absent": ["pull", "org/absent"],
        "has no GGUF model": ["pull", "org/none"],
        "is no name on the hub": ["pull", "not a name"],
        "there is no model at org/absent.gguf": ["run", "org/absent.gguf", "-p", "x"],
        "no file org/absent:Q8_0 and no repository org/absent": ["run", "org/absent:Q8_0", "-p", "x"],
        "there is no model at ./org/one": ["run", "./org/one", "-p", "x"],
    }.items():
        code, out, err = shell.run(*arguments)
        assert (code, out) == (1, "")
        assert complaint in err
        assert (err[:8], err.count("\n")) == ("pyvelo: ", 1)


def test_a_hub_that_does_not_answer(shell: Shell) -> None:
    code, out, err = shell.run("pull", "org/one", HF_ENDPOINT="http://127.0.0.1:9")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "cannot get org/one from the hub" in err
    assert "without a network, a path or a name of pyvelo list works" in err


def test_a_path_goes_before_a_name(shell: Shell, hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "one").write_bytes(tiny_model.read_bytes())
    code = f"import os; os.chdir({str(tmp_path)!r})\n"
    code += "from pyvelo.models.hub import locate\nprint(locate('org/one'))\n"
    assert shell.python(code) == "org/one\n"
    assert hub.requests == []


def test_without_the_library_a_name_says_what_to_install(shell: Shell) -> None:
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from pyvelo.models.hub import cached_models, locate, pull\n"
        "from pyvelo.errors import ModelError\n"
        "for call in (locate, pull):\n"
        "    try: call('org/one:Q8_0')\n"
        "    except ModelError as error: print(error)\n"
        "print(cached_models())\n"
    )
    lines = shell.python(code).splitlines()
    assert "there is no file org/one:Q8_0" in lines[0]
    assert all('pip install "pyvelo[hub]"' in line for line in lines[:2])
    assert lines[2] == "[]"
