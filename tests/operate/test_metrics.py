"""The catalogue in docs/metrics.md against the code, a running server, the alert rules and the dashboards."""

from __future__ import annotations

import re
import time

import metrics_doc
import pytest
import yaml
from live import RULES, Load, Scrape, metric_names, panel_queries, recorded_pages, samples_of, scrape
from local_server import LocalServer

# What a run on the CPU cannot show: it is NVML's (tests/server/metrics checks it against a stand-in and on a GPU).
NEEDS_GPU = {metric.name for metric in metrics_doc.declared() if metric.name.startswith("spmmd_gpu_")}


def catalogue() -> dict[str, metrics_doc.Metric]:
    return {metric.name: metric for metric in metrics_doc.declared()}


def series_names() -> set[str]:
    return {name for metric in metrics_doc.declared() for name in metric.series}


def test_the_page_is_what_the_code_declares() -> None:
    page = metrics_doc.page(metrics_doc.declared())
    assert metrics_doc.OUTPUT.read_text() == page, "docs/metrics.md is stale: run scripts/metrics_doc.py"


@pytest.fixture(scope="module")
def scraped(loaded: tuple[LocalServer, Load]) -> Scrape:
    """A scrape that holds every metric of the catalogue, or the last one after some seconds."""
    server, _ = loaded
    deadline = time.monotonic() + 20
    while True:
        types, helps, samples = scrape(server.metrics)
        if set(catalogue()) - NEEDS_GPU <= set(types) or time.monotonic() > deadline:
            return types, helps, samples
        time.sleep(0.5)


def test_every_metric_of_the_catalogue_is_scraped(scraped: Scrape) -> None:
    types, helps, _ = scraped
    for name, metric in catalogue().items():
        if name in NEEDS_GPU:
            continue
        assert types.get(name) == metric.type, name
        assert helps[name] == metric.help, name


def test_nothing_is_scraped_that_the_catalogue_lacks(scraped: Scrape) -> None:
    types, _, _ = scraped
    assert set(types) <= set(catalogue())


def test_labels_are_those_of_the_catalogue(scraped: Scrape) -> None:
    _, _, samples = scraped
    by_series = {series: metric for metric in metrics_doc.declared() for series in metric.series}
    for name, labels, _ in samples:
        expected = {label for label, _ in by_series[name].labels} | ({"le"} if name.endswith("_bucket") else set())
        assert set(labels) == expected, name


def test_what_a_gpu_adds_is_in_the_catalogue_with_its_labels() -> None:
    page = recorded_pages()[-1]
    types = dict(re.findall(r"(?m)^# TYPE (\S+) (\S+)$", page))
    assert set(types) >= NEEDS_GPU
    for name in NEEDS_GPU:
        assert types[name] == catalogue()[name].type
    for name, labels, _ in samples_of(page):
        if name in NEEDS_GPU:
            assert set(labels) == {label for label, _ in catalogue()[name].labels}, name


def test_conventions_of_names() -> None:
    for name, metric in catalogue().items():
        assert name.endswith("_total") == (metric.type == "counter"), name
        if metric.type == "histogram":
            assert name.endswith(("_seconds", "_tokens")), name


def test_rules_and_dashboards_name_only_what_exists() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    known = series_names() | {rule["record"] for rule in rules if "record" in rule}
    assert rules
    for rule in rules:
        names = metric_names(rule["expr"])
        assert names, rule
        assert names <= known, f"{rule.get('alert', rule.get('record'))}: unknown {names - known}"
    queries = list(panel_queries())
    assert len(queries) > 20
    for query in queries:
        names = metric_names(query.expression)
        assert names, query
        assert names <= known, f"{query}: unknown {names - known}"


def test_series_go_with_their_layer(loaded: tuple[LocalServer, Load]) -> None:
    server, _load = loaded
    # The load registers and removes this layer in turns, so it is absent in some scrape.
    seen = [any(labels.get("layer") == "rolling" for _, labels, _ in scrape(server.metrics)[2])]
    deadline = time.monotonic() + 15
    while (True not in seen or False not in seen) and time.monotonic() < deadline:
        seen.append(any(labels.get("layer") == "rolling" for _, labels, _ in scrape(server.metrics)[2]))
    assert True in seen
    assert False in seen
