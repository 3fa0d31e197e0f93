"""No step is larger than what is counted for it: each field by itself, and all that a scheduler sends."""

from dataclasses import fields, replace

import numpy as np

from executor_svc.fake.worker import FakeWorker
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import (
    INT32_MAX,
    Adapter,
    AdapterLoad,
    Admission,
    BlockReceive,
    BlockSend,
    EncoderInput,
    Fork,
    GrammarLoad,
    Int32Array,
    PoolingInput,
    PoolingTask,
    Resources,
    SamplingRow,
    Step,
    TableDelta,
    no_pairs,
)
from octavo_shared.step_wire.token_rules import TokenRules
from octavo_shared.step_wire.wire import encode_step
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.step.step_size import step_bytes
from scheduler_svc.executors.serving_limits import PlannerSettings, serving_limits
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping
from tests.support.driving import Bench, max_tokens
from tests.support.each_row import each_row

WIDTHS = {"released_slots": 0, "deactivated_slots": 0, "activated_slots": 0, "replaced_blocks": 3}
SAMPLING = SamplingRow(
    0.5, INT32_MAX, 0.5, 0.5, 2**64 - 1, INT32_MAX, INT32_MAX, INT32_MAX, 0.5, 2.0, 1.0, 1.0, INT32_MAX
)
FORK = Fork(INT32_MAX, INT32_MAX, INT32_MAX, SAMPLING)
MOVES = ("blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy")

TRANSFERS = ("blocks_to_send", "blocks_to_receive", "transfers_to_cancel")


def largest(num: int) -> Int32Array:
    """Return numbers that are as long as they can be, each another one."""
    return (INT32_MAX - np.arange(num)).astype(np.int32)


def admission(num: int, rules: TokenRules | None) -> Admission:
    return Admission(
        *(
            INT32_MAX,
            INT32_MAX,
            largest(num),
            INT32_MAX,
            INT32_MAX,
            largest(num),
            SAMPLING,
            2**64 - 1,
            rules,
            INT32_MAX,
        ),
        traceparent="00-" + "f" * 52,
        resources=Resources(INT32_MAX, INT32_MAX),
        state_block=INT32_MAX,
        encoder_input=EncoderInput(INT32_MAX, largest(num), largest(num)),
    )


def rules(name: str, num: int) -> TokenRules:
    value: object = largest(num)
    if name == "banned_words":
        value = largest(2 * num).reshape(num, 2)
    elif name == "allowed_mask":
        value = b"\xff" * num
    elif name == "biases":
        value = np.ones(num, np.float32)
    return TokenRules(**{name: value})  # type: ignore[arg-type]


def steps(num: int) -> dict[str, Step]:
    """Return steps that are full of one thing each, so many times."""
    values: dict[str, object] = {
        "admissions": (admission(3, None),) * num,
        "forks": (FORK,) * num,
        "beam_forks": (FORK,) * num,
        "grammar_drops": tuple(largest(num).tolist()),
        "grammar_loads": (GrammarLoad(INT32_MAX, Grammar(b"x" * 10)),) * num,
        "adapter_drops": tuple(largest(num).tolist()),
        "adapter_loads": (AdapterLoad(INT32_MAX, Adapter("é" * 10, bytes(32))),) * num,
    }
    for field in fields(TableDelta):
        width = WIDTHS.get(field.name, 2)
        values.setdefault(field.name, largest(num * width).reshape(num, width) if width else largest(num))
    full = {name: TableDelta(**{name: value}) for name, value in values.items()}  # type: ignore[arg-type]
    full["a long sequence"] = TableDelta(admissions=(admission(num, None),))
    for field in fields(TokenRules):
        full[field.name] = TableDelta(admissions=(admission(1, rules(field.name, num)),))
    large = {"names": Step(1, 1, TableDelta(), registered_blocks=largest(num), block_names=b"\xff" * 16 * num)}
    large |= {
        name: Step(2**64 - 1, 2**64 - 1, delta, table_digest=2**64 - 1, keeps_live=True) for name, delta in full.items()
    }
    texts = tuple(PoolingInput(2**32 - 1, largest(3), b"\xff" * 3, PoolingTask.SCORE) for _ in range(num))
    large["pooling_inputs"] = Step(1, 1, TableDelta(), pooling_inputs=texts)
    pairs = np.stack((largest(2 * num)[:num], largest(2 * num)[num:]), axis=1)
    moves = {name: replace(large["forks"], delta=TableDelta(), **{name: pairs}) for name in MOVES}  # type: ignore[arg-type]
    saves = Step(1, 1, TableDelta(), states_to_save=largest(3 * num).reshape(num, 3))
    secret, host = b"\xff" * 16, "f" * 200
    sends = BlockSend(2**64 - 1, f"{host}:65535", "f" * 36, largest(num), secret)
    transfers = {
        "blocks_to_send": Step(1, 1, TableDelta(), blocks_to_send=(sends,)),
        "blocks_to_receive": Step(
            1, 1, TableDelta(), blocks_to_receive=(BlockReceive(2**64 - 1, largest(num), secret),)
        ),
        "transfers_to_cancel": Step(1, 1, TableDelta(), transfers_to_cancel=(2**64 - 1,) * num),
    }
    return large | moves | transfers | {"states_to_save": saves}


@each_row(1, 500)
def test_no_field_takes_more_than_is_counted_for_it(num: int) -> None:
    for name, step in steps(num).items():
        size = pb.StreamStepsRequest(step=encode_step(step)).ByteSize()
        assert size <= step_bytes(step) <= 1000 + 4 * size, f"{name}: a bound, and one that is of use"


def test_all_fields_of_a_step_are_filled_once() -> None:
    filled = {field.name for field in (*fields(TableDelta), *fields(TokenRules))} | {
        *MOVES,
        *TRANSFERS,
        "pooling_inputs",
        "states_to_save",
    }
    assert {*steps(1)} >= filled
    names = {"registered_blocks", "block_names", "pooling_inputs", "states_to_save"}
    of_replays = {"draft_counts", "draft_token_ids"}  # no scheduler sends them
    numbers = {"epoch", "step_id", "table_digest", "keeps_live"}
    known = {*numbers, "delta", *MOVES, *TRANSFERS, *names, *of_replays}
    assert {field.name for field in fields(Step)} == known
    assert no_pairs().size == 0


@each_row(*PreemptionMode)
def test_a_scheduler_sends_no_step_above_its_limit(mode: PreemptionMode) -> None:
    vocab_size = 2_000
    info = replace(
        FakeWorker().info,
        vocab_size=vocab_size,
        max_model_len=40,
        num_device_blocks=24,
        num_host_blocks=24,
        block_size_tokens=4,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_message_bytes=45_000,
    )
    limits = serving_limits(info, PlannerSettings(preemption_mode=mode))
    assert limits.max_admitted_bytes < info.max_message_bytes
    bench = Bench(limits)
    rules = TokenRules(banned_token_ids=largest(2_000), allowed_mask=b"\xff" * 125)  # 10,000 bytes
    for arrival in range(12):
        beams = BeamSearchParams(3, 1, 1.0, EarlyStopping.NEVER) if arrival == 5 else None
        added = bench.add(
            arrival, 6, max_tokens(24), num_sequences=1 + arrival % 2 * (beams is None), beam_search=beams
        )
        added.token_rules = rules
    sizes = [pb.StreamStepsRequest(step=encode_step(step)).ByteSize() for step in bench.run()]
    assert 20_000 < max(sizes) <= info.max_message_bytes
    assert sum(bench.planner.preemption.num_preemptions.values()), "nothing was computed again"
