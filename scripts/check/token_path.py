"""List the modules that run between LLM.generate and a drawn token.

    python scripts/check/token_path.py
    python scripts/check/token_path.py --limit 20

A greedy request runs twice on the demo model in the package: the first run packs weights. In the second one a
profiler notes the functions of pyvelo that are called, until the sampler has drawn a token. The output lists
their modules in the order of their first calls, and then the functions from the step to the C call that
computes. The wrappers of the compiled library count too. The status is 1 if there are more modules than
--limit.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import run_main

STEP = ("pyvelo.engine.step", "step")
RUN, DRAW = "velo_context_run", "velo_sample"
"""C functions: the forward pass, and the draw of tokens."""


@dataclass
class TokenPath:
    """Calls of a request. modules: functions by module; to_c: functions from the step to the forward pass."""

    modules: dict[str, list[str]] = field(default_factory=dict)
    to_c: list[str] = field(default_factory=list)
    drawn: bool = False

    def watch(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call; for sys.setprofile."""
        if self.drawn:
            return
        if event == "call":
            module, name = named(frame)
            if module.split(".")[0] == "pyvelo" and name not in self.modules.setdefault(module, []):
                self.modules[module].append(name)
        elif event == "c_call" and argument.__name__ == RUN:
            self.to_c = [*names_since(frame, STEP), RUN]
        elif event == "c_return" and argument.__name__ == DRAW:
            self.drawn = True


def named(frame: FrameType) -> tuple[str, str]:
    """Return the module and the name of a frame's function."""
    return frame.f_globals.get("__name__", ""), frame.f_code.co_name


def names_since(frame: FrameType, start: tuple[str, str]) -> list[str]:
    """Return the active functions, from the one that `start` called to the function of `frame`."""
    names: list[str] = []
    now: FrameType | None = frame
    while now is not None and named(now) != start:
        module, name = named(now)
        names.append(f"{module.removeprefix('pyvelo.')}.{name}")
        now = now.f_back
    return names[::-1]


def token_path() -> TokenPath:
    """Run the request and return what it called."""
    from pyvelo import LLM, SamplingParams
    from pyvelo.demo import DEMO_MODEL

    path, params = TokenPath(), SamplingParams(max_tokens=2, temperature=0.0)
    with LLM(DEMO_MODEL) as llm:
        llm.generate("Hello", params)
        before = sys.getprofile()
        sys.setprofile(path.watch)
        try:
            llm.generate("Good day", params)
        finally:
            sys.setprofile(before)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=int, help="fail if there are more modules")
    limit = parser.parse_args().limit
    path = token_path()
    for number, (module, names) in enumerate(path.modules.items(), 1):
        shown = ", ".join(name for name in names if name[0] != "<")
        print(f"{number:2} {module}: {shown}")
    print(f"from the step to C: {' > '.join(path.to_c)}")
    if limit is not None and len(path.modules) > limit:
        print(f"{len(path.modules)} modules, more than {limit}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
