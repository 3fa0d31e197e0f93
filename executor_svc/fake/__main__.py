"""`python -m executor_svc.fake`: the executor's service without a model and without torch.

Read next: `executor_svc/fake/worker.py`; `executor_svc/fake/faults.py` for what it does wrong when it is told to.
"""

import os
import sys
from functools import partial

from executor_svc.config import FakeConfig
from executor_svc.fake.faults import FakeFaults, FaultPlan, parse_slow_step_every
from executor_svc.fake.scripted_worker import Script, ScriptedWorker
from executor_svc.fake.worker import FakeWorker
from executor_svc.service.process import run_executor
from executor_svc.worker.adapter_sources import AdapterSources
from octavo_shared.process.config import load_config_or_exit

__all__ = ["FakeWorker", "main"]


def main() -> int:
    """Run the fake executor; return the exit code."""
    config = load_config_or_exit(FakeConfig, sys.argv[1:], os.environ)
    return run_executor(config, lambda: make_worker(config))


def make_worker(config: FakeConfig) -> FakeWorker:
    """Return the worker that the settings describe. Raises ModelLoadError: its script is wrong."""
    adapters = AdapterSources.of(config.lora_dir, config.lora)
    make = partial(ScriptedWorker, Script.read(config.script)) if config.script else FakeWorker
    return make(
        block_size_tokens=config.block_size_tokens,
        num_device_blocks=config.num_device_blocks,
        num_host_blocks=config.num_host_blocks,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_message_bytes=config.max_message_bytes,
        step_ms=config.step_ms,
        token_us=config.token_us,
        eos_probability=config.eos_probability,
        sliding_window_tokens=config.sliding_window_tokens,
        has_states=config.states,
        num_device_states=config.num_device_states,
        num_host_states=config.num_host_states,
        nan_token_id=config.nan_token_id,
        max_grammar_slots=config.max_grammar_slots,
        has_grammar_threads=True,
        num_adapter_slots=config.num_adapter_slots,
        read_adapter=adapters.read,
        has_adapter_thread=True,
        adapter_names=adapters.names,
        has_pooling=config.pooling or config.pooling_only,
        is_generative=not config.pooling_only,
        faults=FakeFaults(_fault_plan(config)),
        max_transfers=config.max_transfers,
        updates_weights=bool(config.weights_dir),
    )


def _fault_plan(config: FakeConfig) -> FaultPlan:
    slow_step_every, slow_step_ms = parse_slow_step_every(config.slow_step_every)
    return FaultPlan(
        fail_step_every=config.fail_step_every,
        hang_step_every=config.hang_step_every,
        exit_after_steps=config.exit_after_steps,
        slow_step_every=slow_step_every,
        slow_step_ms=slow_step_ms,
    )


if __name__ == "__main__":
    sys.exit(main())
