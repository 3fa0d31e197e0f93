import re

import pytest

from octavo.bench.config import Metric, parse_slo
from tests.support.each_row import each_row


def test_limits_are_read_in_ms_and_s() -> None:
    slo = parse_slo("ttft=200ms, itl = 50ms,e2e=1.5s")
    assert slo.limits_s == {Metric.TTFT: 0.2, Metric.ITL: 0.05, Metric.E2E: 1.5}


@each_row(
    ("", "is not an objective; write METRIC=TIME with ttft, itl, tpot, e2e"),
    ("ttft", "'ttft' is not an objective"),
    ("ttft=200", "'ttft=200' is not an objective"),
    ("speed=2s", "'speed=2s' is not an objective"),
    ("ttft=1.2.3s", "'1.2.3' is not a number"),
    ("ttft=0ms", "must be above 0"),
    ("ttft=1s,ttft=2s", "gives ttft twice"),
)
def test_what_is_no_objective_is_refused(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        parse_slo(text)
