"""What all dashboards are put together from: queries, panels, variables."""

from __future__ import annotations

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    BigValueTextMode,
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
QUEUE = 'queue=~"$queue"'
HOST = f'{QUEUE}, instance=~"$instance"'
WORKER = f'{HOST}, worker=~"$worker"'
WINDOW = "[$__rate_interval]"
STAT_HEIGHT, GRAPH_HEIGHT = 4, 8
FIGURE, HALF, THIRD = 4, 12, 8
"""Widths, of 24."""


def query(expression: str, legend: str = "", *, heat: bool = False) -> prometheus.Dataquery:
    """One PromQL query of a panel."""
    built = prometheus.Dataquery().expr(expression).legend_format(legend)
    return built.format(PromQueryFormat.HEATMAP) if heat else built


def rate(metric: str, by: str = "queue", labels: str = QUEUE) -> str:
    """A counter's increase a second, summed over all workers."""
    return f"sum by ({by}) (rate(streamfleet_{metric}{{{labels}}}{WINDOW}))"


def told(metric: str, by: str = "queue", labels: str = QUEUE) -> str:
    """A gauge of the exporter; where two of them read one Redis, both tell the same."""
    return f"max by ({by}) (streamfleet_{metric}{{{labels}}})"


def swept(by: str = "queue", labels: str = QUEUE) -> str:
    """Requests that sweeps ended, a second: the workers that had them have no part in it."""
    return rate("swept_total", by, f'{labels}, outcome=~"expired|failed|dead"')


def quantile(q: float, metric: str, by: str = "queue", labels: str = QUEUE) -> str:
    """The q-quantile of a histogram over all workers, in the histogram's unit."""
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', f'le, {by}', labels)})"


def quantiles(
    metric: str, legend: str = "{{queue}}", *, by: str = "queue", labels: str = QUEUE
) -> list[prometheus.Dataquery]:
    """Median, 95th and 99th percentile."""
    return [
        query(quantile(q, metric, by, labels), f"{legend} p{round(q * 100)}".strip())
        for q in (0.5, 0.95, 0.99)
    ]


def mean(metric: str, by: str = "queue", labels: str = QUEUE) -> str:
    """The mean of what a histogram has seen; absent where it has seen nothing."""
    return f"{rate(f'{metric}_sum', by, labels)} / ({rate(f'{metric}_count', by, labels)} > 0)"


def share(hits: str, queries: str, by: str = "queue", labels: str = QUEUE) -> str:
    """What share of the second counter's increase the first one's is; absent where there is none."""
    return f"{rate(hits, by, labels)} / ({rate(queries, by, labels)} > 0)"


def number(
    title: str,
    text: str,
    unit: str,
    expression: str,
    legend: str = "{{queue}}",
    *,
    name_only: bool = False,
    width: int = FIGURE,
) -> stat.Panel:
    """A single figure for each series; with `name_only`, its legend in the figure's place."""
    panel = (
        stat.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .no_value("unknown")
        .height(STAT_HEIGHT)
        .span(width)
        .graph_mode(BigValueGraphMode.NONE if name_only else BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(query(expression, legend))
    )
    return panel.text_mode(BigValueTextMode.NAME) if name_only else panel


def lines(
    title: str,
    text: str,
    unit: str,
    *targets: prometheus.Dataquery,
    stacked: bool = False,
    most: float | None = None,
    width: int = HALF,
) -> timeseries.Panel:
    """Curves over time, from 0 to `most`, where that is known."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .height(GRAPH_HEIGHT)
        .span(width)
        .draw_style(GraphDrawStyle.LINE)
        .fill_opacity(20 if stacked else 5)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if most is not None:
        panel = panel.max(most)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for target in targets:
        panel = panel.with_target(target)
    return panel


def heat(
    title: str, text: str, unit: str, metric: str, *, labels: str = QUEUE, width: int = HALF
) -> heatmap.Panel:
    """How the values of a histogram are spread, over time."""
    expression = f"sum by (le) (increase(streamfleet_{metric}_bucket{{{labels}}}{WINDOW}))"
    return (
        heatmap.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit("short")
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .height(GRAPH_HEIGHT)
        .span(width)
        .with_target(query(expression, "{{le}}", heat=True))
    )


def board(name: str, text: str, *, many: bool = False) -> dashboard.Dashboard:
    """An empty dashboard with the variables of all: where the data are, and which queue (or queues)."""
    return (
        dashboard.Dashboard(f"streamfleet: {name}")
        .uid(f"streamfleet-{name}")
        .tags(["streamfleet"])
        .description(text)
        .refresh("10s")
        .time("now-30m", "now")
        .editable()
        .link(dashboard.DashboardLink("streamfleet").tags(["streamfleet"]).keep_time(True).include_vars(True))
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus").label("Data source"))
        .with_variable(
            variable("queue", "Queue", "label_values(streamfleet_queue_max_depth, queue)", many=many)
        )
    )


def variable(name: str, label: str, values: str, *, many: bool) -> dashboard.QueryVariable:
    """A choice among the values that a label has; among several at once, and all, with `many`."""
    built = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(values)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    )
    return built.include_all(True).multi(True) if many else built
