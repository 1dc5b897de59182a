"""docs/grafana.json: /metrics has every metric and label that the board asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from .conftest import Serve

BOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8")
)
EXPRESSIONS = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
METRIC = re.compile(r"(pyvelo:\w+)(?:\{(\w+)=~\"\$(\w+)\"\})?")


def test_each_metric_and_label_is_served(serve: Serve) -> None:
    server = serve()
    server.ask("/v1/completions", {"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    server.until_idle()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").data.decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for expression in EXPRESSIONS:
        asked = METRIC.findall(expression)
        assert asked
        assert {name for name, _, _ in asked} <= set(labels), expression
        for name, label, _ in asked:
            grouped = re.findall(r"sum by \((\w+)\)", expression)
            assert {*grouped, label} - {""} <= labels[name], expression


def test_panels_have_names_of_their_own_and_do_not_overlap() -> None:
    panels = BOARD["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert {panel["gridPos"][side] for panel in panels for side in "wh"} == {12, 8}
    assert all(x in (0, 12) and y % 8 == 0 for x, y in places)
    for values in (places, [panel["id"] for panel in panels], [panel["title"] for panel in panels]):
        assert len(set(values)) == len(panels)


def test_variables_are_defined() -> None:
    defined = {each["name"] for each in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD["panels"])))
    assert used == (defined | {"__rate_interval"})
