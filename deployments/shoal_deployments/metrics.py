"""Counters and times of one frontend, and its engines' numbers, for Prometheus.

| name | labels | is |
|---|---|---|
| ``shoal_http_requests_total`` | path, status | answers; 499 where the client left before the end |
| ``shoal_http_request_seconds`` | path | time from the request's head to the answer's end |
| ``shoal_requests_held`` | | generations in progress |
| ``shoal_time_to_first_token_seconds`` | | from the request's head to its first token |
| ``shoal_prompt_tokens_total`` | | tokens of accepted prompts |
| ``shoal_generated_tokens_total`` | | tokens received from the engines |
| ``shoal_engine_*`` | replica | each number of ``/stats``, those of the journals included |

All but the last have the label ``frontend`` as well: one address leads to any of the frontends, and
each counts what it answered itself. Add them up to have all.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shoal.inference.journal import JournalStats
from shoal.inference.protocol import Stats
from shoal_deployments.engine_client import ReplicaStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAUGES = frozenset(
    {
        "busy_s",
        "running",
        "max_running",
        "waiting",
        "kv_blocks_total",
        "kv_blocks_free",
        "kv_blocks_cached",
        "journal_pending",
        "journal_oldest_s",
        "journal_failing",
    }
)


class Metrics:
    """The numbers of one frontend, in a registry of its own."""

    def __init__(self) -> None:
        self.frontend = uuid.uuid4().hex[:8]
        """Tells this process from others behind the same address, also from the one before it."""
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "shoal_http_requests", "Answers.", ("path", "status"), registry=self.registry
        )
        self.request_seconds = Histogram(
            "shoal_http_request_seconds",
            "From the request's head to the answer's end.",
            ("path",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.held = Gauge("shoal_requests_held", "Generations in progress.", registry=self.registry)
        self.first_token_seconds = Histogram(
            "shoal_time_to_first_token_seconds",
            "From the request's head to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "shoal_prompt_tokens", "Tokens of accepted prompts.", registry=self.registry
        )
        self.generated_tokens = Counter(
            "shoal_generated_tokens", "Tokens from the engines.", registry=self.registry
        )

    def text(self, replicas: Sequence[ReplicaStats]) -> bytes:
        """All of it in Prometheus' text format."""
        both = CollectorRegistry()
        both.register(_Labelled(self.registry, {"frontend": self.frontend}))
        both.register(_Engines(replicas))
        return generate_latest(both)


class _Labelled:
    """What is in ``registry``, with ``labels`` on each number."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """The families of the registry."""
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in family.samples
            ]
            yield family


class _Engines:
    """The engines' numbers as one scrape finds them."""

    def __init__(self, replicas: Sequence[ReplicaStats]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """One family for each number."""
        for field in fields(Stats):
            values = {each.replica: getattr(each.stats, field.name) for each in self._replicas}
            yield _family(field.name, values)
        yield _family("busy_s", {each.replica: each.busy_s for each in self._replicas})
        yield _family("migrated", {each.replica: each.migrated for each in self._replicas})
        journals = {each.replica: each.journal for each in self._replicas if each.journal}
        if journals:
            for field in fields(JournalStats):
                values = {name: getattr(journals[name], field.name) for name in journals}
                yield _family(f"journal_{field.name}", values)


def _family(name: str, values: Mapping[str, float]) -> Metric:
    kind = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
    what = f"{name.replace('_', ' ').capitalize()} of each replica."
    family = kind(f"shoal_engine_{name}", what, labels=("replica",))
    for replica, value in values.items():
        family.add_metric((replica,), value)
    return family
