"""The metrics of our own fronts, on their way to the port that serves the scheduler's.

A front sends them as Prometheus reads them. The engine adds up what all fronts counted; what a front had counted when
its session ended stays counted.
"""

import asyncio
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from octavo_shared.errors import CallerError
from octavo_shared.process.metric import Family

# What a front counts has a tenth of these, with as many tenants as metrics name.
MAX_BYTES = 2**20
MAX_PAST_SERIES = 20_000

_Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def encode_families(families: Iterable[Family]) -> bytes:
    """Return metrics as text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(list(families)))
    return generate_latest(registry)


def decode_families(content: bytes) -> list[Family]:
    """Return the metrics in a text; for a thread, as it takes long. Raises CallerError: it is none."""
    try:
        return list(text_string_to_metric_families(content.decode()))
    except (ValueError, KeyError, IndexError) as error:
        raise CallerError("front sent malformed metrics") from error


class FrontMetrics:
    """Adds up the metrics of fronts."""

    def __init__(self) -> None:
        self._described: dict[str, Family] = {}
        self._past: dict[str, _Samples] = {}  # by metric: what sessions had counted that have ended
        self._current: dict[int, list[Family]] = {}  # by session

    async def take(self, session: int, content: bytes) -> None:
        """A session says what it has counted so far. Raises CallerError: it is no such text, or too long."""
        if len(content) > MAX_BYTES:
            raise CallerError(f"front sent metrics of {len(content)} bytes; at most {MAX_BYTES} are taken")
        self._current[session] = await asyncio.to_thread(decode_families, content)

    def end(self, session: int) -> None:
        """A session has ended: what it counted stays, up to so many series; what it measured is gone."""
        for family in self._current.pop(session, []):
            room = MAX_PAST_SERIES - sum(map(len, self._past.values()))
            if family.type != "gauge" and len(family.samples) <= room:
                self._described.setdefault(family.name, Family(family.name, family.documentation, family.type))
                _add(self._past.setdefault(family.name, {}), family)

    def merged(self, own: Iterable[Family]) -> Iterator[Family]:
        """Yield the metrics of the engine and of all fronts: counts are added, of gauges the largest value counts."""
        sources: dict[str, list[Family]] = {}
        for family in (*own, *(family for families in self._current.values() for family in families)):
            sources.setdefault(family.name, []).append(family)
        for name in dict.fromkeys((*sources, *self._past)):
            families = sources.get(name, [])
            described = families[0] if families else self._described[name]
            if len(families) == 1 and name not in self._past:
                yield described
                continue
            samples = dict(self._past.get(name, {}))
            for family in families:
                _add(samples, family)
            total = Family(name, described.documentation, described.type)
            for (sample, labels), value in samples.items():
                total.add_sample(sample, dict(labels), value)
            yield total


def _add(samples: _Samples, family: Family) -> None:
    for sample in family.samples:
        key = sample.name, tuple(sample.labels.items())
        if family.type == "gauge":
            samples[key] = max(samples.get(key, sample.value), sample.value)
        else:
            samples[key] = samples.get(key, 0.0) + sample.value


class _Given(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        return iter(self._families)
