"""Builds the Grafana dashboards of the chart into helm/spmmd/files/dashboards/*.json.

The dashboards are code so that they are reviewed as code; a test regenerates them and compares. Panels are rows of
(title, unit, description, [(expression, legend), ...]).
"""

from __future__ import annotations

import argparse
import json
import pathlib
from dataclasses import dataclass, field
from typing import Any

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
)

OUTPUT = pathlib.Path(__file__).resolve().parent.parent / "spmmd" / "files" / "dashboards"
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
SELECTOR = 'job=~"$job",instance=~"$instance"'


@dataclass
class Panel:
    """One panel; `span` is in Grafana's 24 columns."""

    title: str
    unit: str
    description: str
    queries: list[tuple[str, str]]
    kind: str = "timeseries"
    span: int = 12
    height: int = 8
    maximum: float | None = None


@dataclass
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    panels: list[Panel] = field(default_factory=list)


def rate(metric: str, labels: str = "", by: str = "") -> str:
    """Sum of a counter's rate over the selected instances."""
    selector = f"{SELECTOR},{labels}" if labels else SELECTOR
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{{{selector}}}[$__rate_interval]))"


def gauge(metric: str, labels: str = "", by: str = "", aggregate: str = "sum") -> str:
    """A gauge over the selected instances."""
    selector = f"{SELECTOR},{labels}" if labels else SELECTOR
    grouping = f" by ({by})" if by else ""
    return f"{aggregate}{grouping} ({metric}{{{selector}}})"


def quantile(q: float, metric: str, by: str = "", labels: str = "") -> str:
    """A quantile of a histogram over the selected instances."""
    grouping = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, {rate(metric + '_bucket', labels, grouping)})"


INSTANCE_DEVICE = "{{instance}} {{device}}"
EXECUTE = 'rpc=~".*/Execute(Stream)?"'

OVERVIEW = Board(
    "spmmd-overview",
    "spmmd / Overview",
    "Is it up, how much does it do, how fast, and does it fail",
    [
        Panel(
            "Requests",
            "reqps",
            "Execute calls answered per second",
            [(rate("spmmd_requests_total", EXECUTE), "")],
            "stat",
            6,
            4,
        ),
        Panel(
            "Latency p99",
            "s",
            "99 % of Execute calls are faster than this",
            [(quantile(0.99, "spmmd_request_duration_seconds", labels=EXECUTE), "")],
            "stat",
            6,
            4,
        ),
        Panel(
            "Resident layers",
            "none",
            "Layers ready to multiply",
            [(gauge("spmmd_layers", 'state="ready"'), "")],
            "stat",
            6,
            4,
        ),
        Panel(
            "Unhealthy devices",
            "none",
            "Devices lost to an error that they do not recover from",
            [(f"sum(1 - spmmd_device_healthy{{{SELECTOR}}})", "")],
            "stat",
            6,
            4,
        ),
        Panel("Requests by code", "reqps", "All calls", [(rate("spmmd_requests_total", by="code"), "{{code}}")]),
        Panel(
            "Request latency",
            "s",
            "From the arrival of an Execute call to its answer",
            [
                (quantile(0.5, "spmmd_request_duration_seconds", labels=EXECUTE), "p50"),
                (quantile(0.9, "spmmd_request_duration_seconds", labels=EXECUTE), "p90"),
                (quantile(0.99, "spmmd_request_duration_seconds", labels=EXECUTE), "p99"),
            ],
        ),
        Panel(
            "Device memory",
            "bytes",
            "What of each device's budget is taken by what",
            [(gauge("spmmd_device_memory_bytes", 'kind!="total"', "device, kind"), "{{device}} {{kind}}")],
        ),
        Panel(
            "Version",
            "none",
            "Instances by version and backend",
            [(gauge("spmmd_build_info", by="version, backend", aggregate="count"), "{{version}} {{backend}}")],
        ),
    ],
)

KERNELS = Board(
    "spmmd-kernels",
    "spmmd / Kernels and HBM",
    "What the devices do: launches, latency, memory bandwidth. All from the server's own byte and time counters",
    [
        Panel(
            "Memory bandwidth",
            "Bps",
            "Bytes that launches must move, over the time they took",
            [
                (
                    rate("spmmd_kernel_bytes_total", by="device")
                    + " / "
                    + rate("spmmd_kernel_duration_seconds_sum", by="device"),
                    "{{device}}",
                )
            ],
        ),
        Panel(
            "Share of the measured peak",
            "percentunit",
            "Bandwidth of the launches over the read bandwidth measured at start",
            [(gauge("spmmd_hbm_bandwidth_ratio", by="instance, device", aggregate="max"), "{{instance}} {{device}}")],
            maximum=1,
        ),
        Panel(
            "Kernel latency p50",
            "s",
            "Median launch by kernel and format",
            [(quantile(0.5, "spmmd_kernel_duration_seconds", "kernel, format"), "{{kernel}} {{format}}")],
        ),
        Panel(
            "Kernel latency p99",
            "s",
            "99th percentile launch by kernel and format",
            [(quantile(0.99, "spmmd_kernel_duration_seconds", "kernel, format"), "{{kernel}} {{format}}")],
        ),
        Panel(
            "Launches",
            "ops",
            "Launches per second by kernel",
            [(rate("spmmd_kernel_duration_seconds_count", by="kernel, format"), "{{kernel}} {{format}}")],
        ),
        Panel(
            "Useful arithmetic",
            "flops",
            "2 x nonzeros x tokens per second",
            [(rate("spmmd_kernel_flops_total", by="kernel"), "{{kernel}}")],
        ),
        Panel(
            "Bytes against dense",
            "percentunit",
            "Packed bytes over what the same layers take dense: what a launch saves in memory traffic",
            [
                (
                    gauge("spmmd_layer_bytes", by="format") + " / " + gauge("spmmd_layer_dense_bytes", by="format"),
                    "{{format}}",
                )
            ],
        ),
        Panel(
            "Bytes saved",
            "bytes",
            "Dense bytes of the layers less their packed bytes",
            [(f"{gauge('spmmd_layer_dense_bytes')} - {gauge('spmmd_layer_bytes')}", "saved")],
        ),
        Panel(
            "Device busy",
            "percentunit",
            "Share of time in kernels",
            [(rate("spmmd_kernel_duration_seconds_sum", by="instance, device"), "{{instance}} {{device}}")],
        ),
        Panel(
            "Bandwidth measured at start",
            "Bps",
            "The ceiling that the ratio refers to",
            [
                (
                    f"max by (device) (spmmd_hbm_bandwidth_bytes_per_second{{{SELECTOR}}} / "
                    f"(spmmd_hbm_bandwidth_ratio{{{SELECTOR}}} > 0))",
                    "{{device}}",
                )
            ],
        ),
    ],
)

LAYERS = Board(
    "spmmd-layers",
    "spmmd / Layers and memory",
    "What is resident, how large it is, how it came and went",
    [
        Panel("Layers by state", "none", "Versions of layers", [(gauge("spmmd_layers", by="state"), "{{state}}")]),
        Panel(
            "Bytes by format",
            "bytes",
            "Resident packed bytes",
            [(gauge("spmmd_layer_bytes", by="format"), "{{format}}")],
        ),
        Panel(
            "Largest layers",
            "bytes",
            "The twenty largest",
            [(f"topk(20, {gauge('spmmd_layer_bytes', by='layer, format')})", "{{layer}} {{format}}")],
        ),
        Panel(
            "Weights against the budget",
            "percentunit",
            "Resident weights over the device's memory budget",
            [
                (
                    gauge("spmmd_device_memory_bytes", 'kind="weights"', "instance, device")
                    + " / "
                    + gauge("spmmd_device_memory_bytes", 'kind="total"', "instance, device"),
                    "{{instance}} {{device}}",
                )
            ],
            maximum=1,
        ),
        Panel(
            "Loads by source",
            "ops",
            "Layers made resident per second: uploaded, from files, from the cache, back from the host",
            [(rate("spmmd_layer_loads_total", by="source"), "{{source}}")],
        ),
        Panel(
            "Evictions",
            "ops",
            "Layers that left device memory per second, by where their bytes are kept",
            [(rate("spmmd_layer_evictions_total", by="to"), "to {{to}}")],
        ),
        Panel(
            "Eviction and return p90",
            "s",
            "Time to move a layer out, and to bring it back",
            [
                (quantile(0.9, "spmmd_layer_eviction_duration_seconds", "to"), "to {{to}}"),
                (quantile(0.9, "spmmd_layer_reload_duration_seconds", "source"), "from {{source}}"),
            ],
        ),
        Panel(
            "Requests waiting for layers",
            "none",
            "That are evicted and on their way back: latency that more memory would save",
            [(gauge("spmmd_requests_waiting_for_layers", by="instance"), "{{instance}}")],
        ),
        Panel(
            "Memory and disk beside the devices",
            "bytes",
            "Evicted layers and registrations in host memory, files of the packed cache, regions shared with callers",
            [
                (gauge("spmmd_host_layer_bytes"), "evicted layers"),
                (gauge("spmmd_upload_bytes"), "registrations"),
                (gauge("spmmd_cache_bytes"), "cache files"),
                (gauge("spmmd_shm_bytes"), "shared regions"),
            ],
        ),
        Panel(
            "Packed cache",
            "ops",
            "Hits, misses, files written and dropped; a corrupt one is set aside and made again",
            [(rate("spmmd_cache_events_total", by="event"), "{{event}}")],
        ),
        Panel(
            "Packing time p90",
            "s",
            "Pruning and packing, by format",
            [(quantile(0.9, "spmmd_pack_duration_seconds", "format"), "{{format}}")],
        ),
    ],
)

SERVING = Board(
    "spmmd-serving",
    "spmmd / Serving",
    "Queues, batches, refusals",
    [
        Panel(
            "Waiting requests",
            "none",
            "By device",
            [(gauge("spmmd_queue_depth", by="instance, device"), "{{instance}} {{device}}")],
        ),
        Panel(
            "Time in the queue",
            "s",
            "From admission to the first launch",
            [
                (quantile(0.5, "spmmd_request_queue_duration_seconds"), "p50"),
                (quantile(0.99, "spmmd_request_queue_duration_seconds"), "p99"),
            ],
        ),
        Panel(
            "Batch width",
            "none",
            "Tokens in one launch",
            [
                (quantile(0.5, "spmmd_batch_tokens"), "p50"),
                (quantile(0.99, "spmmd_batch_tokens"), "p99"),
            ],
        ),
        Panel(
            "Refused",
            "reqps",
            "Requests refused by reason",
            [(rate("spmmd_rejected_total", by="reason"), "{{reason}}")],
        ),
        Panel(
            "Shared memory",
            "none",
            "Regions that callers on the host registered, and rings that they opened",
            [(gauge("spmmd_shm_regions", by="kind"), "{{kind}} regions"), (gauge("spmmd_rings"), "rings")],
        ),
        Panel("Calls by method", "reqps", "All methods", [(rate("spmmd_requests_total", by="rpc"), "{{rpc}}")]),
        Panel(
            "Latency p99 by method",
            "s",
            "All methods",
            [(quantile(0.99, "spmmd_request_duration_seconds", "rpc"), "{{rpc}}")],
        ),
    ],
)

GPU = Board(
    "spmmd-gpu",
    "spmmd / GPU",
    "What the driver says of the GPUs (NVML); empty on the CPU backend",
    [
        Panel(
            "Temperature",
            "celsius",
            "Of the GPU",
            [(gauge("spmmd_gpu_temperature_celsius", by="instance, device", aggregate="max"), INSTANCE_DEVICE)],
        ),
        Panel(
            "Power",
            "watt",
            "Drawn, and allowed",
            [
                (gauge("spmmd_gpu_power_watts", by="instance, device", aggregate="max"), INSTANCE_DEVICE),
                (gauge("spmmd_gpu_power_limit_watts", by="device", aggregate="max"), "{{device}} limit"),
            ],
        ),
        Panel(
            "Clocks",
            "hertz",
            "Of the SMs and of the memory",
            [(gauge("spmmd_gpu_clock_hertz", by="device, clock", aggregate="min"), "{{device}} {{clock}}")],
        ),
        Panel(
            "Clocks held down",
            "none",
            "1 while power or temperature holds the clocks down",
            [(gauge("spmmd_gpu_throttled", by="device, reason", aggregate="max"), "{{device}} {{reason}}")],
        ),
        Panel(
            "Memory",
            "bytes",
            "As the driver sees it, other processes included",
            [(gauge("spmmd_gpu_memory_bytes", 'kind!="total"', "device, kind"), "{{device}} {{kind}}")],
        ),
        Panel(
            "ECC errors",
            "none",
            "Since the driver was loaded",
            [(gauge("spmmd_gpu_ecc_errors_total", by="device, type"), "{{device}} {{type}}")],
        ),
        Panel(
            "Any kernel running",
            "percentunit",
            "Share of time, of any process",
            [(gauge("spmmd_gpu_utilization_ratio", by="instance, device", aggregate="max"), INSTANCE_DEVICE)],
            maximum=1,
        ),
    ],
)


def by_shard(expression: str) -> str:
    """What a server's series of (job, instance) say, summed by the shard that it is."""
    shard = f"(spmmd_shard_count{{{SELECTOR}}} > bool 0)"
    return f"sum by (shard) ({expression} * on (job, instance) group_left (shard) {shard})"


SHARDS = Board(
    "spmmd-shards",
    "spmmd / Shards",
    "How evenly the shards are loaded, and whether all of them are there; a server without sharding is shard 0 of 1",
    [
        Panel(
            "Servers of each shard",
            "none",
            "Those that answer scrapes",
            [(gauge("spmmd_shard_count", by="shard", aggregate="count"), "shard {{shard}}")],
        ),
        Panel(
            "Shards without a server",
            "none",
            "Their layers are served by nobody",
            [
                (
                    f"{gauge('spmmd_shard_count', aggregate='max')} - "
                    f"count({gauge('spmmd_shard_count', by='shard', aggregate='count')})",
                    "missing",
                )
            ],
        ),
        Panel(
            "Requests by shard",
            "reqps",
            "Execute calls answered per second: uneven where blocks are few or callers prefer some",
            [(by_shard(rate("spmmd_requests_total", EXECUTE, "job, instance")), "shard {{shard}}")],
        ),
        Panel(
            "Errors by shard",
            "reqps",
            "All calls that failed for reasons that are not the caller's",
            [
                (
                    by_shard(
                        rate("spmmd_requests_total", 'code!~"OK|CANCELLED|INVALID_ARGUMENT|NOT_FOUND"', "job, instance")
                    ),
                    "shard {{shard}}",
                )
            ],
        ),
        Panel(
            "Waiting requests by shard",
            "none",
            "Divided by its servers, what each shard should be scaled by",
            [(by_shard(gauge("spmmd_queue_depth", by="job, instance")), "shard {{shard}}")],
        ),
        Panel(
            "Weights by shard",
            "bytes",
            "Resident packed bytes, over all replicas",
            [(by_shard(gauge("spmmd_layer_bytes", by="job, instance")), "shard {{shard}}")],
        ),
    ],
)

BOARDS = [OVERVIEW, KERNELS, LAYERS, SERVING, SHARDS, GPU]


def build_panel(spec: Panel) -> Any:  # the SDK's builders share no useful base type
    """The SDK's panel for a spec."""
    if spec.kind == "stat":
        panel: Any = stat.Panel().color_mode(common.BigValueColorMode.NONE)
    else:
        legend = common.VizLegendOptions(
            display_mode=common.LegendDisplayMode.TABLE,
            placement=common.LegendPlacement.BOTTOM,
            show_legend=True,
            calcs=["mean", "max"],
        )
        panel = timeseries.Panel().fill_opacity(8).line_width(1).min(0)
        panel = panel.legend(_Built(legend))
    panel = (
        panel.title(spec.title)
        .description(spec.description)
        .unit(spec.unit)
        .datasource(DATASOURCE)
        .span(spec.span)
        .height(spec.height)
    )
    if spec.maximum is not None:
        panel = panel.max(spec.maximum)
    for index, (expression, legend_text) in enumerate(spec.queries):
        query = prometheus.Dataquery().expr(expression).datasource(DATASOURCE).ref_id(chr(ord("A") + index))
        panel = panel.with_target(query.legend_format(legend_text) if legend_text else query)
    return panel


class _Built:
    """Wraps a finished model for the SDK's methods that take a builder."""

    def __init__(self, value: object) -> None:
        self._value = value

    def build(self) -> object:
        return self._value


def build(board: Board) -> str:
    """A dashboard as JSON text."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["spmmd"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, query in (
        ("job", "label_values(spmmd_build_info, job)"),
        ("instance", 'label_values(spmmd_build_info{job=~"$job"}, instance)'),
    ):
        builder = builder.with_variable(
            dashboard.QueryVariable(name)
            .label(name.capitalize())
            .datasource(DATASOURCE)
            .query(query)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    for panel in board.panels:
        builder = builder.with_panel(build_panel(panel))
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(builder.build())), indent=2, sort_keys=True) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the files on disk differ instead of writing them")
    arguments = parser.parse_args()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    stale = []
    for board in BOARDS:
        path = OUTPUT / f"{board.uid}.json"
        text = build(board)
        if arguments.check:
            if not path.exists() or path.read_text() != text:
                stale.append(path.name)
        else:
            path.write_text(text)
    if stale:
        raise SystemExit(f"stale: {', '.join(stale)}; run python helm/dashboards/generate.py")


if __name__ == "__main__":
    main()
