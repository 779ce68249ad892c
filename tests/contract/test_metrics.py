"""What docs/ says of the metrics is so: the table, the dashboard's and the alerts' expressions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from modelguard.telemetry._metrics import METRICS, REASONS, Metric

yaml = pytest.importorskip("yaml", reason="needs PyYAML to read the alert rules")

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "metrics.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana" / "modelguard.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DOCS / "grafana" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]

ROW = re.compile(
    r"^\| `(?P<name>modelguard_\w+)` \| (?P<kind>\w+) \| (?P<label>.*?) \| (?P<tells>.+) \|$", re.MULTILINE
)
NAME = re.compile(r"\bmodelguard_\w+")
MATCHER = re.compile(r'\b(\w+)(?:=~|!~|!=|=)"([^"]*)"')
SELECTOR = re.compile(r"\b(modelguard_\w+)\{([^}]*)\}")
#: Where a metric comes from, in every Prometheus; modelguard does not choose these labels.
TARGET = {"instance", "job", "le"}


def exposed(metric: Metric) -> set[str]:
    """The names under which a metric can be asked for."""
    name = metric.prometheus_name
    return {f"{name}_bucket", f"{name}_count", f"{name}_sum"} if metric.kind == "histogram" else {name}


OF = {name: metric for metric in METRICS.values() for name in exposed(metric)}


def expressions() -> dict[str, str]:
    """Every expression of the dashboard and of the alerts, by the panel's or the alert's name."""
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    }
    return found | {rule["alert"]: rule["expr"] for rule in RULES}


EXPRESSIONS = expressions()


def wrongs(expression: str) -> list[str]:
    """What an expression asks for that the hook does not tell."""
    found = [name for name in NAME.findall(expression) if name not in OF]
    for name, inner in SELECTOR.findall(expression):
        metric = OF.get(name)
        if metric is None:
            continue
        for label, value in MATCHER.findall(inner):
            if label not in {*metric.labels, *TARGET}:
                found.append(f"{name} has no label {label}")
            elif label == metric.label and not metric.only_current and value not in metric.values:
                found.append(f"{label} of {name} is never {value}")
            elif label == "le" and float(value) not in metric.buckets:
                found.append(f"{name} has no bucket {value}")
    return found


@pytest.mark.parametrize("title", EXPRESSIONS)
def test_expressions_ask_for_what_is_told(title: str) -> None:
    """A panel or an alert that asks for a name, a label or a value that does not exist would be silent for ever."""
    expression = EXPRESSIONS[title]
    assert NAME.search(expression), expression
    assert [] == wrongs(expression)
    assert [expression.count(opening) for opening in "({["] == [expression.count(closing) for closing in ")}]"]


@pytest.mark.parametrize(
    "wrong",
    [
        "modelguard_load_total > 0",
        'modelguard_releases_total{outcome="living"}',
        'modelguard_queue_depth{guard="nlp"}',
        'modelguard_load_stall_seconds_bucket{le="0.7"}',
        "modelguard_batch_size",
    ],
)
def test_the_check_of_expressions_finds_mistakes(wrong: str) -> None:
    """A misspelt name, a value, a label or a bucket that does not exist, a histogram without its suffix."""
    assert 1 == len(wrongs(wrong))


def test_the_gauges_that_are_added_up_are_named() -> None:
    """Of every other gauge a scrape of several workers has the highest value."""
    (sentence,) = re.findall(r"The gauges ([^;]*?) are sums over live workers;", PAGE)
    assert {one.prometheus_name for one in METRICS.values() if one.mode == "livesum"} == set(NAME.findall(sentence))


def test_the_dashboard_shows_every_metric() -> None:
    """Every metric of the hook is on the dashboard, except a few figures that only explain others."""
    shown = {OF[name].name for title, text in EXPRESSIONS.items() for name in NAME.findall(text) if " " in title}
    assert {"load.deferred", "load.reasons", "loads.started", "swaps.chosen", "trims"} == set(METRICS) - shown


def test_the_dashboard_can_be_imported() -> None:
    """It asks for its data source, its variables are of metrics that exist, and no panel covers another."""
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert ["datasource", "instance", "guard", "function"] == list(variables)
    assert [] == [name for name in NAME.findall(variables["guard"]["definition"]) if name not in OF]
    assert [] == [name for name in NAME.findall(variables["function"]["definition"]) if name not in OF]
    panels = DASHBOARD["panels"]
    assert len(panels) == len({panel["id"] for panel in panels})
    for panel in panels:
        assert panel["type"] == "row" or "${datasource}" == panel["datasource"]["uid"]
    covered = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(covered) == len(set(covered))
    assert 24 > max(x for x, _ in covered)


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alerts_say_what_is_wrong(rule: dict[str, Any]) -> None:
    """Each has a severity, and a summary that names the guard or the function and the instance."""
    assert {"alert", "expr", "labels", "annotations"} <= set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    summary = rule["annotations"]["summary"]
    subjects = {OF[name].subject for name in NAME.findall(rule["expr"])}
    assert [f"$labels.{subject}" in summary for subject in subjects] == [True]
    assert "$labels.instance" in summary
    assert rule["annotations"]["description"]


def test_the_page_lists_every_alert() -> None:
    """The table of docs/metrics.md is that of the rules, in their order."""
    assert [rule["alert"] for rule in RULES] == re.findall(r"^\| `(Modelguard\w+)` \|", PAGE, re.MULTILINE)


def test_the_page_lists_every_metric() -> None:
    """Name, kind, labels and meaning of docs/metrics.md are those of the hook, nothing missing and nothing else."""
    told = {row["name"]: (row["kind"], row["label"].strip(), row["tells"]) for row in ROW.finditer(PAGE)}
    assert told == {
        metric.prometheus_name: (metric.kind, label_of(metric), metric.help.rstrip(".")) for metric in METRICS.values()
    }


def label_of(metric: Metric) -> str:
    """What the table says of a second label."""
    if metric.label is None:
        return ""
    if metric.only_current:
        return f"`{metric.label}`: the current one"
    values = "a [reason](#reasons)" if metric.values == REASONS else ", ".join(f"`{each}`" for each in metric.values)
    return f"`{metric.label}`: {values}"


def test_the_page_lists_every_reason() -> None:
    """All values of the label that has most are explained."""
    section = PAGE.partition("### Reasons")[2].partition("\n## ")[0]
    assert [] == [reason for reason in REASONS if f"`{reason}`" not in section]


def test_the_page_is_that_of_the_registry() -> None:
    """What prometheus_client exposes has the names and kinds of the table."""
    client = pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    from modelguard.telemetry.prometheus import prometheus

    registry = client.CollectorRegistry()
    prometheus(registry)
    exposed_as = {
        family.name + ("_total" if family.type == "counter" else ""): family.type for family in registry.collect()
    }
    assert exposed_as == {row["name"]: row["kind"] for row in ROW.finditer(PAGE)}
