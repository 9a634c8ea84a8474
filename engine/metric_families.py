"""API process: makes series that all carry the labels of one engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from octavo.engine.histogram import Histogram

Samples = Sequence[tuple[Mapping[str, str], float]]
"""Labels of their own, the same in all, and values."""


@dataclass(frozen=True, slots=True)
class Families:
    """Series with common labels."""

    labels: Mapping[str, str]

    def gauge(self, name: str, help_text: str, samples: Samples) -> Metric:
        """Make a gauge."""
        return self._fill(GaugeMetricFamily, name, help_text, samples)

    def counter(self, name: str, help_text: str, samples: Samples) -> Metric:
        """Make a counter; its name gets the suffix ``_total``."""
        return self._fill(CounterMetricFamily, name, help_text, samples)

    def histogram(
        self, name: str, help_text: str, samples: Sequence[tuple[Mapping[str, str], Histogram]]
    ) -> Metric:
        """Make a histogram."""
        family = HistogramMetricFamily(name, help_text, labels=[*self.labels, *samples[0][0]])
        for own_labels, histogram in samples:
            labels = [*self.labels.values(), *own_labels.values()]
            family.add_metric(labels, histogram.cumulative_buckets(), histogram.total)
        return family

    def _fill(
        self,
        family_type: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        help_text: str,
        samples: Samples,
    ) -> Metric:
        family = family_type(name, help_text, labels=[*self.labels, *samples[0][0]])
        for own_labels, value in samples:
            family.add_metric([*self.labels.values(), *own_labels.values()], value)
        return family
