"""Run vLLM's own tests of its server against `pyvelo serve`, as far as they need no GPU.

    pip install pytest pytest-asyncio openai anthropic requests regex jsonschema  (elsewhere)
    python scripts/check/vllm_suite.py vllm-0.33.0
    python scripts/check/vllm_suite.py vllm-0.33.0 openai/completion/test_completion.py

The argument is vLLM's source, such as its sdist from the package index, unpacked. The tests' models
cannot be had here: models with random weights and the same kinds of vocabulary answer. A case passes, or is
skipped with a reason of scripts/check/_vllm_skips.py. Prints the reasons; the exit status is 0 if no
case fails.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts.check._suite import Case, run_suite, totals
from scripts.models._shapes import Shape
from scripts.models.make import write_model
from scripts.upstream._pin import read_pin
from scripts.upstream.fetch import locate

FILES = (
    "openai/completion/test_completion.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_root_path.py",
    "openai/models/test_models.py",
    "openai/responses/test_simple.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "anthropic/test_messages.py",
    "serve/tokenize/test_tokenization.py",
)
MODEL = Shape(vocab="llama-spm", ctx=8192)
QWEN = Shape("qwen3", vocab="qwen2", ctx=8192)


def run(source: Path, files: Sequence[str], folder: Path) -> list[Case]:
    """Run files of the suite; print what pytest prints.

    Raises: ScriptError if it could not run.
    """
    here = source / "tests" / "entrypoints"
    if not here.is_dir():
        raise ScriptError(f"{source} has no tests/entrypoints: give the folder of vLLM's source")
    for name in files:
        place = folder / "tests" / "entrypoints" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(here / name, place)
        for above in Path(name).parents:
            conftest = here / above / "conftest.py"
            if conftest.is_file():
                shutil.copy(conftest, folder / "tests" / "entrypoints" / above / "conftest.py")
    for inside in (folder / "tests", *(folder / "tests").rglob("*")):
        if inside.is_dir():
            (inside / "__init__.py").touch()
    tree = locate(read_pin()).path
    template = (tree / "models" / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8")
    model, qwen, report = folder / "model.gguf", folder / "qwen.gguf", folder / "report.xml"
    write_model(MODEL, model, type_name="q8_0")
    write_model(QWEN, qwen, type_name="q8_0", chat_template=template)
    models = {"model": model, "qwen": qwen}
    options = ["-o", "asyncio_default_fixture_loop_scope=function"]
    found = [str(Path("tests") / "entrypoints" / name) for name in files]
    return run_suite("scripts.check._vllm_plugin", models, folder, report, [*options, *found])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path, help="folder of vLLM's source")
    parser.add_argument("files", nargs="*", help="files below tests/entrypoints; default: most")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = run(arguments.source, arguments.files or FILES, Path(folder))
    reasons = Counter(case.reason.split("\n")[0] for case in cases if case.outcome == "skipped")
    for reason, n in reasons.items():
        print(f"{n:4} skipped: {reason}")
    counts = totals(cases)
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
