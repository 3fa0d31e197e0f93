"""What a decode step takes beside the one call of the C library does not grow with its rows, and stays little."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from executor_svc.config import ExecutorConfig
from executor_svc.native import library
from executor_svc.native import sampling as native_sampling
from executor_svc.native.binding import bind
from executor_svc.worker.interface import execute
from executor_svc.worker.loading import load_worker
from octavo_shared.step_wire.step import SamplingRow, Step, TableDelta
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import StepDriver
from tests.numerics.launch_ahead import admit
from tests.numerics.reference import random_prompt
from tests.support.collection import no_collection

NUM_ROWS = 1, 8, 32

GREEDY = SamplingRow()
DRAWN = SamplingRow(temperature=0.8, top_k=5, seed=1)


class Work:
    """Counts functions of the library, operators of torch and lines of Python."""

    def __init__(self) -> None:
        self.library_calls: Counter[str] = Counter()
        self.torch_operators: Counter[str] = Counter()
        self.num_lines = 0

    def bind(self, path: Path, functions: Any) -> Any:
        """Bind a library whose calls are counted."""
        bound = bind(path, functions)
        for name, *_ in functions:
            setattr(bound, name, self._counted(name, getattr(bound, name)))
        return bound

    def _counted(self, name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.library_calls[name] += 1
            return function(*arguments)

        return call

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count from 0 what is done meanwhile."""
        work = self
        self.library_calls.clear()
        self.torch_operators.clear()
        self.num_lines = 0

        class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                work.torch_operators[func.overloadpacket.__name__] += 1
                return func(*args, **(kwargs or {}))

        def trace(frame: FrameType, event: str, _: object) -> Any:
            self.num_lines += event == "line" and not frame.f_code.co_filename.endswith(Path(__file__).name)
            return trace

        before = sys.gettrace()
        with no_collection(), Operators():  # type: ignore[no-untyped-call]
            sys.settrace(trace)
            try:
                yield
            finally:
                sys.settrace(before)


@pytest.mark.parametrize(
    ("sampling", "library_calls", "most_lines"),
    [
        (GREEDY, {"octavo_forward": 1}, 279),
        (DRAWN, {"octavo_forward": 1, "octavo_sampling_scratch_bytes": 1, "octavo_choose": 1}, 409),
    ],
    ids=["greedy", "drawn"],
)
def test_a_decode_step_takes_as_much_python_for_many_rows_as_for_one(
    sampling: SamplingRow,
    library_calls: dict[str, int],
    most_lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Work()
    for module in (library, native_sampling):
        monkeypatch.setattr(module, "bind", work.bind)
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {})
    worker = load_worker(ExecutorConfig(model=str(tmp_path), cpu_kernels="native", num_device_blocks=200))
    lines = set()
    for num_rows in NUM_ROWS:
        worker.reset()
        driver = StepDriver(worker)
        driver.execute(admit(driver, [random_prompt(3, seed=row) for row in range(num_rows)], sampling))
        for _ in range(3):  # what is looked up once is known then
            driver.execute(TableDelta())

        step = Step(1, driver.last_step_id + 1, TableDelta())
        with work.counted():
            result = execute(worker, step)

        assert len(result.sampled_token_ids) == num_rows
        assert work.library_calls == library_calls
        assert not work.torch_operators
        lines.add(work.num_lines)
    assert len(lines) == 1
    assert max(lines) <= most_lines
