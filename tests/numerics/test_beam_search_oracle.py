"""Our beam search finds what transformers' `generate` finds: the same tokens, scores and number of outputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LlamaForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from scheduler_svc.core.beam_search import BeamSearch
from scheduler_svc.request.outputs import FinishReason, Float32Array, Hypothesis
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping
from tests.numerics.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.support.beam_driving import HashedModel, run_search
from tests.support.each_row import each_row

pytestmark = pytest.mark.usefixtures("one_thread")

IN_TRANSFORMERS: dict[EarlyStopping, bool | str] = {
    EarlyStopping.TRUE: True,
    EarlyStopping.FALSE: False,
    EarlyStopping.NEVER: "never",
}
LENGTH_PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
# transformers fills places that nothing has taken with scores around -1e9.
NO_HYPOTHESIS = -1e5


class HashedConfig(PretrainedConfig):  # type: ignore[misc]
    model_type = "hashed"


class HashedCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """`HashedModel` as transformers wants its models."""

    config_class = HashedConfig
    main_input_name = "input_ids"

    def __init__(self, model: HashedModel) -> None:
        super().__init__(HashedConfig(vocab_size=model.vocab_size))
        self.model = model
        self.weight = torch.nn.Parameter(torch.zeros(1))  # where transformers looks for device and dtype

    def forward(self, input_ids: torch.Tensor, **_: object) -> CausalLMOutput:
        return CausalLMOutput(logits=torch.from_numpy(self.model.logits(input_ids.numpy()))[:, None])


@dataclass(frozen=True)
class Case:
    params: BeamSearchParams
    prompt: list[int]
    end_token_ids: tuple[int, ...]
    max_new_tokens: int


def generated(model: Any, case: Case) -> list[tuple[list[int], float]]:
    """Return (output tokens, score) of each sequence that transformers finds."""
    prompt = torch.tensor([case.prompt])
    config = GenerationConfig(
        num_beams=case.params.beam_width,
        num_return_sequences=case.params.num_outputs,
        length_penalty=case.params.length_penalty,
        early_stopping=IN_TRANSFORMERS[case.params.early_stopping],
        max_new_tokens=case.max_new_tokens,
        eos_token_id=list(case.end_token_ids) or None,
        pad_token_id=0,
        do_sample=False,
        use_cache=not isinstance(model, HashedCausalLM),
        return_dict_in_generate=True,
        output_scores=True,
    )
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    lengths = (output.beam_indices >= 0).sum(dim=1)
    rows = zip(output.sequences[:, len(case.prompt) :], lengths, output.sequences_scores, strict=True)
    found = [(row[:length].tolist(), float(score)) for row, length, score in rows]
    return [(token_ids, score) for token_ids, score in found if score > NO_HYPOTHESIS]


def found(
    next_logits: Callable[[npt.NDArray[np.int64]], torch.Tensor], vocab_size: int, case: Case
) -> list[Hypothesis]:
    """Return what our search finds, with the log-softmax that transformers uses."""

    def next_logprobs(histories: npt.NDArray[np.int64]) -> Float32Array:
        logprobs: Float32Array = torch.log_softmax(next_logits(histories), dim=-1).numpy()
        return logprobs

    num_prompt_tokens, ends = len(case.prompt), frozenset(case.end_token_ids)
    max_num_tokens = num_prompt_tokens + case.max_new_tokens
    search = BeamSearch(case.params, num_prompt_tokens, max_num_tokens, ends, vocab_size=vocab_size)
    return run_search(search, case.prompt, next_logprobs)


def assert_same(hypotheses: list[Hypothesis], expected: list[tuple[list[int], float]], case: Case) -> None:
    assert [hypothesis.token_ids.tolist() for hypothesis in hypotheses] == [token_ids for token_ids, _ in expected]
    for hypothesis, (token_ids, score) in zip(hypotheses, expected, strict=True):
        sum_logprobs = score * len(token_ids) ** case.params.length_penalty
        stopped = token_ids[-1] in case.end_token_ids
        assert hypothesis.score == pytest.approx(score, abs=1e-4)
        assert float(hypothesis.logprobs.sum()) == pytest.approx(sum_logprobs, abs=1e-4, rel=1e-5)
        assert hypothesis.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(token_ids) == case.max_new_tokens


def random_case(seed: int, vocab_sizes: tuple[int, int], num_levels: int = 0) -> tuple[HashedModel, Case]:
    """Draw everything that can vary from the seed."""
    random = np.random.default_rng(seed)
    vocab_size = int(random.integers(*vocab_sizes, endpoint=True))
    num_ends = int(random.integers(0, min(2, vocab_size - 1), endpoint=True))
    end_token_ids = tuple(random.choice(vocab_size, num_ends, replace=False).tolist())
    beam_width = int(random.choice([2, 4, 8]))
    params = BeamSearchParams(
        beam_width=beam_width,
        num_outputs=int(random.integers(1, beam_width, endpoint=True)),
        length_penalty=float(random.choice(LENGTH_PENALTIES)),
        early_stopping=list(EarlyStopping)[random.integers(3)],
    )
    model = HashedModel(
        seed,
        vocab_size,
        spread=float(random.choice([0.5, 2.0, 6.0])),
        end_token_ids=end_token_ids,
        end_bias=float(random.choice([0.0, 1.0, 2.0])),
        num_levels=num_levels,
    )
    prompt = random.integers(0, vocab_size, random.integers(1, 4)).tolist()
    return model, Case(params, prompt, end_token_ids, max_new_tokens=int(random.integers(1, 20, endpoint=True)))


def check_random_case(seed: int, vocab_sizes: tuple[int, int], num_levels: int = 0) -> None:
    model, case = random_case(seed, vocab_sizes, num_levels)
    if model.vocab_size - len(case.end_token_ids) == 1 and case.params.early_stopping is EarlyStopping.TRUE:
        # One token can go on, so there is one true beam; transformers counts its stand-ins as hypotheses.
        case = replace(case, params=replace(case.params, early_stopping=EarlyStopping.FALSE))

    expected = generated(HashedCausalLM(model), case)
    hypotheses = found(lambda histories: torch.from_numpy(model.logits(histories)), model.vocab_size, case)

    assert_same(hypotheses, expected, case)


@pytest.fixture
def stable_topk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers take the first of equal candidates; torch.topk promises no order of them."""

    def topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        ordered, indices = torch.sort(values, dim=-1, descending=True, stable=True)
        return ordered[..., :k], indices[..., :k]

    monkeypatch.setattr(torch, "topk", topk)


@each_row(*range(200))
def test_random_search_equals_transformers(seed: int) -> None:
    check_random_case(seed, vocab_sizes=(8, 50))


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(1000, 5000, 250))
def test_thousands_of_random_searches_equal_transformers(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 250):
        check_random_case(seed, vocab_sizes=(8, 50))


@pytest.mark.usefixtures("stable_topk")
@pytest.mark.parametrize("seed", range(60))
def test_search_full_of_ties_equals_transformers_with_an_ordered_topk(seed: int) -> None:
    check_random_case(seed, vocab_sizes=(8, 30), num_levels=3)


@pytest.mark.usefixtures("stable_topk")
@pytest.mark.parametrize("seed", range(60))
def test_search_wider_than_the_vocabulary_equals_transformers_with_an_ordered_topk(seed: int) -> None:
    check_random_case(seed, vocab_sizes=(2, 7))


@pytest.mark.slow
@pytest.mark.usefixtures("stable_topk")
@pytest.mark.parametrize("num_levels", [0, 1, 3])
@pytest.mark.parametrize("first_seed", range(1000, 3000, 250))
def test_thousands_of_tied_and_tiny_searches_equal_transformers(first_seed: int, num_levels: int) -> None:
    for seed in range(first_seed, first_seed + 250):
        check_random_case(seed, vocab_sizes=(2, 12), num_levels=num_levels)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return save_tiny_model(tmp_path_factory.mktemp("beams") / "llama")


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("beam_width", [2, 4, 8])
def test_search_on_a_real_model_with_a_cache_equals_transformers(
    beam_width: int, early_stopping: EarlyStopping, tiny_llama: LlamaForCausalLM
) -> None:
    params = BeamSearchParams(beam_width, beam_width, 0.5, early_stopping)
    ends = tuple(range(5, VOCAB_SIZE, 12))
    case = Case(params, prompt=[11, 3, 60, 42, 7], end_token_ids=ends, max_new_tokens=16)

    with torch.inference_mode():
        expected = generated(tiny_llama, case)
        hypotheses = found(lambda rows: tiny_llama(torch.from_numpy(rows)).logits[:, -1], VOCAB_SIZE, case)

    assert_same(hypotheses, expected, case)
    assert {hypothesis.finish_reason for hypothesis in hypotheses} >= {FinishReason.STOP}
