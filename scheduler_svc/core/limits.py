"""The numbers that bound a scheduler."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The numbers that bound a scheduler; sizes in tokens and blocks.

    `max_num_batched_tokens` is the token budget of a step and at least `max_num_seqs`, so that every
    running sequence can decode in every step. `max_model_len` is at most what the pool holds, so that
    a sequence that has the pool for itself can always grow to its end.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...] = ()
    watermark: float = 0.01

    def __post_init__(self) -> None:
        assert 1 <= self.max_num_seqs <= self.max_num_batched_tokens
        assert self.max_model_len <= self.num_blocks * self.block_size
