import re

import numpy as np
import pytest

from octavo.bench.config import Metric, parse_lengths, parse_slo
from tests.support.each_row import each_row

COUNT = 20_000


def draw(text: str) -> "np.typing.NDArray[np.int64]":
    return np.array(parse_lengths(text).draw(np.random.default_rng(7), COUNT))


def test_a_number_is_that_length_each_time() -> None:
    assert set(draw("128")) == {128}


def test_uniform_has_both_limits_and_all_between_equally_often() -> None:
    lengths, counts = np.unique(draw("uniform:3:7"), return_counts=True)
    assert lengths.tolist() == [3, 4, 5, 6, 7]
    assert abs(counts / COUNT - 0.2).max() < 0.01


@each_row("normal", "lognormal")
def test_mean_and_deviation_are_those_of_the_lengths(name: str) -> None:
    lengths = draw(f"{name}:400:80")
    assert lengths.mean() == pytest.approx(400, rel=0.01)
    assert lengths.std() == pytest.approx(80, rel=0.03)


def test_lognormal_is_skewed_and_normal_is_not() -> None:
    def skewness(text: str) -> float:
        lengths = draw(text)
        return float((((lengths - lengths.mean()) / lengths.std()) ** 3).mean())

    assert skewness("lognormal:400:200") > 1
    assert abs(skewness("normal:400:40")) < 0.1


def test_what_lies_outside_the_limits_becomes_the_limit() -> None:
    lengths = draw("normal:100:50:90:110")
    assert (lengths.min(), lengths.max()) == (90, 110)
    assert (lengths == 90).mean() > 0.3


def test_without_limits_a_length_is_at_least_one() -> None:
    assert draw("normal:2:5").min() == 1


@each_row("normal", "lognormal")
def test_no_deviation_is_a_constant(name: str) -> None:
    assert set(draw(f"{name}:64:0")) == {64}


@each_row(
    ("", "not a whole number"),
    ("-5", "not a whole number"),
    ("1.5", "not a whole number"),
    ("0", "lengths go from 1"),
    ("9999999999", "lengths go from 1"),
    ("zipf:2:3", "'zipf' is not a distribution; write N, uniform:MIN:MAX"),
    ("constant:2:3", "'constant' is not a distribution"),
    ("uniform:5", "uniform does not take 1 numbers"),
    ("uniform:9:5", "the shorter limit first"),
    ("uniform:a:5", "'a' is not a whole number"),
    ("normal:5:1:2", "normal does not take 3 numbers"),
    ("normal:x:1", "'x' is not a number"),
    ("normal:nan:1", "'nan' is not a number"),
    ("normal:0:1", "the mean must be at least 1"),
    ("lognormal:8:-1", "the deviation at least 0"),
    ("lognormal:1:1e200", "mean and deviation must be at most 2147483647"),
    ("normal:1e300:1", "mean and deviation must be at most 2147483647"),
    ("lognormal:8:1:9:3", "the shorter limit first"),
)
def test_what_is_no_length_is_refused_with_the_reason(text: str, what: str) -> None:
    with pytest.raises(ValueError, match="is not a length") as refused:
        parse_lengths(text)
    assert what in str(refused.value)
    assert repr(text) in str(refused.value)


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
