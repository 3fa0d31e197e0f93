"""All planted faults."""

from tests.mutants import (
    benchmark_faults,
    client_faults,
    core_faults,
    executor_faults,
    fleet_faults,
    front_faults,
    model_faults,
    numerics_faults,
    openai_faults,
    same_bits_faults,
    service_faults,
    step_faults,
    step_log_faults,
    tool_call_faults,
)

FAULTS = (
    *core_faults.FAULTS,
    *fleet_faults.FAULTS,
    *step_faults.FAULTS,
    *step_log_faults.FAULTS,
    *executor_faults.FAULTS,
    *model_faults.FAULTS,
    *numerics_faults.FAULTS,
    *same_bits_faults.FAULTS,
    *service_faults.FAULTS,
    *front_faults.FAULTS,
    *tool_call_faults.FAULTS,
    *openai_faults.FAULTS,
    *benchmark_faults.FAULTS,
    *client_faults.FAULTS,
)
