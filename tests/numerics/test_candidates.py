"""The candidates of beams equal the top of transformers' log-softmax, also along forked beams."""

from dataclasses import dataclass

import numpy as np
import torch

from octavo_shared.step_wire.step import UNKNOWN_TOKEN, SamplingRow, StepResult, TableDelta, pairs
from tests.numerics.conftest import TinyModel
from tests.numerics.driver import StepDriver, fork_of
from tests.numerics.reference import MakeDriver, assert_close, random_prompt, reference_logits
from tests.numerics.tiny_models import VOCAB_SIZE

WIDTH = 3
BEAM = SamplingRow(num_candidates=2 * WIDTH)


def assert_candidates(result: StepResult, model: TinyModel, histories: list[list[int]], widths: list[int]) -> None:
    """Fail unless the candidates are those of the histories, in order; the models have no ties."""
    expected = [
        torch.log_softmax(reference_logits(model, history)[-1], -1).topk(width)
        for history, width in zip(histories, widths, strict=True)
    ]
    assert result.candidate_token_ids is not None
    assert result.candidate_logprobs is not None
    assert result.candidate_token_ids.tolist() == torch.cat([row.indices for row in expected]).tolist()
    assert_close(torch.from_numpy(result.candidate_logprobs), torch.cat([row.values for row in expected]))


def test_candidates_of_every_width_beside_sampled_rows(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver
) -> None:
    model = tiny_models["gqa"]
    driver = make_driver(model)
    prompts = [random_prompt(length, seed=length) for length in (5, 9, 12, 7)]
    rows = [SamplingRow(num_candidates=4), SamplingRow(num_logprobs=0), SamplingRow(num_candidates=VOCAB_SIZE), BEAM]
    admissions = tuple(driver.admission(slot, prompts[slot], 1, row) for slot, row in enumerate(rows))
    chunks = pairs(*((slot, len(prompts[slot])) for slot in (2, 1, 0, 3)))

    result = driver.execute(TableDelta(admissions=admissions, prefill_chunks=chunks))

    assert_candidates(result, model, [prompts[slot] for slot in (2, 0, 3)], [VOCAB_SIZE, 4, 2 * WIDTH])
    logits = reference_logits(model, prompts[1])[-1]
    token_id = int(logits.argmax())
    assert result.sampled_token_ids.tolist() == [UNKNOWN_TOKEN, token_id, UNKNOWN_TOKEN, UNKNOWN_TOKEN]
    assert result.logprobs is not None
    assert np.isnan(result.logprobs).tolist() == [True, False, True, True]
    assert_close(torch.tensor(result.logprobs[1]), torch.log_softmax(logits, -1)[token_id])


def test_a_step_of_beams_alone_has_no_sampled_tokens(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver
) -> None:
    model, prompt = tiny_models["gqa"], random_prompt(6)
    driver = make_driver(model)
    beam = driver.admission(0, prompt, 1, SamplingRow(temperature=1.0, num_logprobs=0, num_candidates=2))

    result = driver.execute(TableDelta(admissions=(beam,), prefill_chunks=pairs((0, 6))))

    assert result.sampled_token_ids.tolist() == [UNKNOWN_TOKEN]
    assert result.logprobs is None
    assert_candidates(result, model, [prompt], [2])
    assert not driver.worker.table.active.any()


@dataclass(frozen=True)
class Beam:
    """A hypothesis and the blocks of its computed tokens."""

    token_ids: list[int]
    score: float
    block_ids: list[int]


def likeliest_continuations(beams: list[Beam], result: StepResult) -> list[tuple[int, int, float]]:
    """Return parent, token id and score of the new beams, best first."""
    assert result.candidate_token_ids is not None
    assert result.candidate_logprobs is not None
    scores = result.candidate_logprobs.reshape(-1, 2 * WIDTH) + np.array([[beam.score] for beam in beams])
    best = np.argsort(-scores, axis=None)[:WIDTH]
    return [(int(i) // (2 * WIDTH), int(result.candidate_token_ids[i]), float(scores.ravel()[i])) for i in best]


def advance(
    driver: StepDriver, beams: list[Beam], result: StepResult, old: int, new: int
) -> tuple[list[Beam], StepResult]:
    """Fork the beams, in the slots `old` and up, into the slots `new` and up, each with its own copy of the last block.

    Who had the new slots is released; the old beams rest until that happens to them in the next step.
    """
    table, children = driver.worker.table, []
    forks, appended_tokens, replaced, appended, copies = [], [], [], [], []
    for slot, (parent, token_id, score) in enumerate(likeliest_continuations(beams, result), start=new):
        forks.append(fork_of(old + parent, slot, BEAM, int(table.generation[slot]) + 1))
        appended_tokens.append((slot, token_id))
        shared, own = beams[parent].block_ids, int(driver.take_blocks(1)[0])
        num_full = len(beams[parent].token_ids) // 4
        if num_full < len(shared):
            replaced.append((slot, num_full, own))
            copies.append((shared[num_full], own))
        else:
            appended.append((slot, own))
        children.append(Beam([*beams[parent].token_ids, token_id], score, [*shared[:num_full], own]))
    delta = TableDelta(
        released_slots=np.flatnonzero(table.live & (np.arange(len(table.live)) // WIDTH == new // WIDTH)).astype(
            np.int32
        ),
        beam_forks=tuple(forks),
        appended_tokens=pairs(*appended_tokens),
        replaced_blocks=np.array(replaced, np.int32).reshape(-1, 3),
        appended_blocks=pairs(*appended),
        activated_slots=np.arange(new, new + WIDTH, dtype=np.int32),
    )
    return children, driver.execute(delta, blocks_to_copy=pairs(*copies))


def test_forked_beams_have_the_candidates_of_their_own_histories(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver
) -> None:
    model, prompt = tiny_models["gqa"], random_prompt(6)
    driver = make_driver(model)
    admission = driver.admission(0, prompt, 0, BEAM)
    result = driver.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((0, 6))))
    beams = [Beam(prompt, 0.0, admission.block_ids.tolist())]

    for step in range(7):
        old, new = (0, WIDTH) if step % 2 == 0 else (WIDTH, 0)
        beams, result = advance(driver, beams, result, old, new)
        assert_candidates(result, model, [beam.token_ids for beam in beams], [2 * WIDTH] * WIDTH)

    assert len({tuple(beam.token_ids) for beam in beams}) == WIDTH
