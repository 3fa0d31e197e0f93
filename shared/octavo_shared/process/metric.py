"""What a metric is: its name, its labels and the sentence that explains it, apart from its values.

A tier lists its metrics as constants, makes a family of each one at a scrape, and the reference page in
docs/metrics.md is written from the same constants (`docs_table`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from octavo_shared.process.histogram import Histogram

__all__ = ["Family", "LabelValues", "Metric", "docs_table", "metrics_in"]

# The values of a metric's labels, in the order of `Metric.labels`.
LabelValues: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Names are in Prometheus' base units: seconds, bytes, ratios from 0 to 1.

    Attributes:
        name: As it is served; a counter's ends with `_total`.
        kind: Its type, in Prometheus' words.
        help: One sentence: meaning and unit.
        labels: Names of its labels. Their values are few and known, whatever clients send.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    def family(self, values: Mapping[LabelValues, float]) -> Family:
        """Return the samples of a counter or a gauge."""
        assert self.kind != "histogram"
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family

    def histogram_family(self, values: Mapping[LabelValues, Histogram]) -> Family:
        """Return the samples of a histogram."""
        assert self.kind == "histogram"
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        for labels, histogram in values.items():
            family.add_metric(labels, buckets=histogram.cumulative(), sum_value=histogram.sum)
        return family

    def single(self, value: float) -> Family:
        """Return the one sample of a counter or a gauge without labels."""
        return self.family({(): value})


def metrics_in(names: Mapping[str, object]) -> tuple[Metric, ...]:
    """Return the metrics that a module defines, in their order; `names` are its globals."""
    return tuple(value for value in names.values() if isinstance(value, Metric))


def docs_table(metrics: Iterable[Metric]) -> str:
    """Return a Markdown table of metrics."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines)
