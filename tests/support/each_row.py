"""A table of cases in one test: every row is tried, and all that fail are told together."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from tests.support.large_tables import SMALL, is_thinned, quick_rows

POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
further_case = pytest.mark.further_case


class _Failures(list[BaseException]):
    @contextmanager
    def of(self, row: object) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as failure:
            failure.add_note(f"in the row {repr(row)[:500]}")
            self.append(failure)

    def tell(self, num_rows: int) -> None:
        if len(self) > 1:
            raise BaseExceptionGroup(f"{len(self)} of {num_rows} rows fail", self)
        for failure in self:
            raise failure


def each_row(*table: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test with each row: the value of its positional parameter, or the tuple of their values.

    Fixtures are its keyword-only parameters; all rows have the same. It is for rows that cost little and leave nothing.
    Of a large table in an area that is thinned `make test` has some rows, and a second test the others.
    """

    def decorate(test: Callable[..., Any]) -> Any:
        assert table, "a table without rows tests nothing"
        parameters = inspect.signature(test).parameters.values()
        fixtures = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        values: Any = table if len(parameters) - len(fixtures) > 1 else [(row,) for row in table]

        @wraps(test)
        async def run_async(part: Any = values, **given: object) -> None:
            failures = _Failures()
            for row in part:
                with failures.of(row):
                    await test(*row, **given)
            failures.tell(len(part))

        @wraps(test)
        def run(part: Any = values, **given: object) -> None:
            failures = _Failures()
            for row in part:
                with failures.of(row):
                    test(*row, **given)
            failures.tell(len(part))

        chosen: Any = run_async if inspect.iscoroutinefunction(test) else run
        chosen.__signature__ = inspect.Signature(fixtures)  # what pytest gives
        if len(table) <= SMALL or not is_thinned(Path(test.__globals__["__file__"])):
            return chosen
        quick = quick_rows(values)
        some, others = ([row for place, row in enumerate(values) if (place in quick) is each] for each in (True, False))
        chosen.__signature__ = inspect.Signature([inspect.Parameter("part", POSITIONAL), *fixtures])
        parts = [pytest.param(some, id="quick"), pytest.param(others, id="further", marks=further_case)]
        return pytest.mark.parametrize("part", parts)(chosen)

    return decorate
