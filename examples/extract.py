"""Turn texts into the rows of a table, by a JSON schema that every answer follows.

    python examples/extract.py "Anna is 31 and lives in Rome." "Ben, 44, from Oslo"
    python examples/extract.py --model org/repo:Q4_K_M "$(cat letter.txt)" > people.csv

All texts are one batch. With pandas, `pandas.DataFrame(rows(llm, texts))` is the table.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from typing import Any

from pyvelo import LLM, SamplingParams
from pyvelo.demo import DEMO_MODEL

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def rows(llm: LLM, texts: list[str]) -> list[dict[str, Any]]:
    """Return a row for each text, with the columns of the schema."""
    params = SamplingParams(temperature=0, max_tokens=400, json_schema=SCHEMA)
    asked = [[{"role": "user", "content": f"Describe this person in JSON.\n\n{text}"}] for text in texts]
    return [json.loads(output.text) for output in llm.chat(asked, params)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--model", default=DEMO_MODEL, help="GGUF file or name; default: the demo model")
    given = parser.parse_args()
    with LLM(given.model) as llm:
        writer = csv.DictWriter(sys.stdout, list(SCHEMA["properties"]))  # type: ignore[call-overload]
        writer.writeheader()
        writer.writerows(rows(llm, given.texts))


if __name__ == "__main__":
    main()
