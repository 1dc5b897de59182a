"""Ask the demo model a question with the new wheel, for cibuildwheel; fail unless the answer is right."""

from __future__ import annotations

import sys

from pyvelo import LLM
from pyvelo.demo import DEMO_MODEL

with LLM(DEMO_MODEL) as llm:
    answer = llm.chat([{"role": "user", "content": "What is 12 + 30?"}]).outputs[0].text
print(answer)
sys.exit("42" not in answer)
