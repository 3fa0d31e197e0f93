"""From a step's layout to logits: flat tensors, one forward pass, the rows that are sampled.

Prefill chunks and decodes share one pass: tokens lie one sequence after the other, without padding. Steps may be
replayed as CUDA graphs; next: `executor_svc/worker/step_graphs.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.adapters.slots import AdapterSlots, using
from executor_svc.adapters.step_rows import NO_ADAPTER, StepRows
from executor_svc.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    LayerCache,
    first_caches,
    join_plans,
)
from executor_svc.device.transfer import index_to_device
from executor_svc.drafts.mtp import Mtp, MtpResult, MtpRows
from executor_svc.models.decoder import Decoder
from executor_svc.models.encoder_decoder import EncoderDecoder
from executor_svc.models.language_model import LanguageModel
from executor_svc.states.live_states import AcceptedDrafts, LiveStates, StepStates
from executor_svc.worker.encoder_inputs import encode_inputs, inputs_of
from executor_svc.worker.last_tokens import LastTokens
from executor_svc.worker.step_graphs import StepGraphs
from executor_svc.worker.step_tokens import StepTokens
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.step import EncoderInput, Int32Array
from octavo_shared.step_wire.table_columns import BlockTables


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tokens of a step, flat."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    attention: list[AttentionMetadata]  # one a cache group


@dataclass(frozen=True, slots=True)
class SampleLogits:
    """Logits of the rows that are sampled; None: another rank has them. Forks share the row of their parent."""

    logits: torch.Tensor | None  # [num_logit_rows, vocab_size] float32
    logit_rows: Int32Array  # [num_samples] index into `logits`
    # [sum of StepLayout.num_prompt_logprobs, hidden_size] of the tokens before those; None: none is wanted.
    prompt_hidden: torch.Tensor | None = None
    likeliest: Int32Array | None = None  # [num_logit_rows] first of the largest logits; None: not looked for
    normed: torch.Tensor | None = None  # [num_tokens, hidden_size] for a head that drafts; None: there is none


class Runner(Protocol):
    """Runs steps of a model on its caches."""

    @property
    def model(self) -> LanguageModel:
        """The model."""

    def run(self, table: BatchTable, layout: StepLayout, *, finds_likeliest: bool) -> SampleLogits:
        """Compute the tokens of a step, 1 or more, and return the logits of its sample rows.

        What is returned is valid until the next step.

        Args:
            table: With the step applied.
            layout: Of the step.
            finds_likeliest: Whether the likeliest token of each row is looked for too, if this runner can.
        """

    def accept_drafts(self, num_accepted: Int32Array) -> None:
        """Let the states take drafts of the last step, which had some.

        Of a row of an active slot `run` lets the states take the first token only: what lies behind it are drafts.

        Args:
            num_accepted: How many of each row were right, the first ones, [num_rows].
        """

    def run_mtp(self, table: BatchTable, rows: MtpRows) -> MtpResult | None:
        """Run the head that drafts, if the model has one; see `MtpRunner.run_mtp`."""

    def encode(self, inputs: Sequence[EncoderInput], tables: BlockTables) -> None:
        """Run the encoder, if the model has one, on inputs with token ids; fill their blocks, which are of `tables`."""


class ModelRunner:
    """Runs the model on the caches. Both are owned elsewhere.

    Args:
        model: With its weights.
        caches: One a layer.
        backend: Of the attention.
        last_tokens: The last sampled tokens; the caller stores there, the runner reads.
        graphs: Of steps; None: there are none.
        states: Of all sequences; None: no layer has a state.
    """

    def __init__(
        self,
        model: LanguageModel,
        caches: Sequence[LayerCache],
        backend: AttentionBackend,
        last_tokens: LastTokens,
        graphs: StepGraphs | None = None,
        states: LiveStates | None = None,
    ) -> None:
        self.model = model
        self.last_tokens = last_tokens
        self._caches = caches
        self._first_caches = first_caches(caches)
        self._backend = backend
        self._graphs = graphs or StepGraphs()
        self._states = states
        self._step_states: StepStates | None = None  # of the last step
        self._adapters = adapters_of(model)
        self._has_mtp = isinstance(model, Decoder) and model.mtp is not None

    @torch.inference_mode()
    def run(self, table: BatchTable, layout: StepLayout, *, finds_likeliest: bool) -> SampleLogits:
        """Compute the tokens of a step; see `Runner.run`. The likeliest tokens are left to the sampler."""
        decodes, pieces = self._graphs.decodes, self._graphs.pieces
        of_rows = None if self._adapters is None else self._adapters.of_sequences[layout.slots]
        if of_rows is not None and (of_rows != NO_ADAPTER).any():
            decodes = pieces = None  # graphs hold the products of the model alone
        if decodes is not None and decodes.can_run(layout):
            hidden = decodes.run(table, layout)
            return SampleLogits(self.model.logits(hidden), layout.sample_rows)
        wanted, num_logit_rows, logit_rows = wanted_tokens(layout)
        if pieces is not None and pieces.can_run(layout):
            hidden = pieces.run(table, layout)[index_to_device(wanted, self.model.device)]
            prompt_hidden = None if layout.num_prompt_logprobs is None else hidden[num_logit_rows:]
            return SampleLogits(self.model.logits(hidden[:num_logit_rows]), logit_rows, prompt_hidden)
        inputs = prepare_input(table, layout, self.last_tokens)
        num_asked = None
        if self._has_mtp:
            num_asked = len(wanted)
            wanted = np.concatenate((wanted, np.arange(len(inputs.token_ids), dtype=np.int32)))
        self._step_states = None if self._states is None else self._states.of_step(layout)
        arguments = (
            inputs.token_ids,
            inputs.positions,
            self._caches,
            self._plan(inputs),
            index_to_device(wanted, self.model.device),
            self._step_states,
        )
        if isinstance(self.model, EncoderDecoder):
            seen = inputs_of(table, layout).seen_by(layout.lengths, self.model.device)
            hidden = self.model.forward(*arguments, encoded=self._backend.plan(seen, self._first_caches[-1]))
        elif of_rows is None:
            hidden = self.model.forward(*arguments)
        else:
            with using(self._adapters, StepRows.of(of_rows, layout.lengths, wanted)):
                hidden = self.model.forward(*arguments)
        logits = self.model.logits(hidden[:num_logit_rows])
        prompt_hidden = None if layout.num_prompt_logprobs is None else hidden[num_logit_rows:num_asked]
        normed = self.model.final_norm(hidden[num_asked:]) if self._has_mtp else None
        return SampleLogits(logits, logit_rows, prompt_hidden, normed=normed)

    @torch.inference_mode()
    def run_mtp(self, table: BatchTable, rows: MtpRows) -> MtpResult | None:
        """Run the head that drafts; see `MtpRunner.run_mtp`."""
        assert isinstance(self.model, Decoder), "no other model has one"
        assert self.model.mtp is not None, "else it is not asked"
        head, inputs = self.model.mtp, prepare_input(table, rows, self.last_tokens)
        wanted = torch.arange(len(rows.slots) if rows.has_drafts else 0)
        hidden = head.forward(
            inputs.token_ids, inputs.positions, self._caches[-1:], self._plan(inputs), wanted, previous=rows.previous
        )
        if not rows.has_drafts:
            return None
        logits = head.logits(hidden)
        token_ids = None if logits is None else logits.argmax(-1).int().numpy()
        return MtpResult(head.final_norm(hidden), token_ids)

    def _plan(self, inputs: ModelInput) -> AttentionPlan:
        return join_plans([*map(self._backend.plan, inputs.attention, self._first_caches)])

    def encode(self, inputs: Sequence[EncoderInput], tables: BlockTables) -> None:
        """Run the encoder; see `Runner.encode`."""
        encode_inputs(self.model, self._caches, self._backend, inputs, tables)

    def accept_drafts(self, num_accepted: Int32Array) -> None:
        """Let the states take the first drafts of each row; see `Runner.accept_drafts`."""
        if self._step_states is not None and num_accepted.any():
            assert isinstance(self.model, Decoder), "no other model has states"
            self.model.accept_drafts(self._step_states, AcceptedDrafts.of(self._step_states.rows, num_accepted))


class FollowedRunner:
    """A runner whose steps a head that drafts follows.

    Args:
        runner: Of the model and of the head.
        mtp: The head.
    """

    def __init__(self, runner: Runner, mtp: Mtp) -> None:
        self.model = runner.model
        self.run_mtp, self.encode = runner.run_mtp, runner.encode
        self._runner = runner
        self._mtp = mtp

    def run(self, table: BatchTable, layout: StepLayout, *, finds_likeliest: bool) -> SampleLogits:
        """Compute the tokens of a step, and let the head take them; see `Runner.run`."""
        computed = self._runner.run(table, layout, finds_likeliest=finds_likeliest)
        assert computed.normed is not None, "a model with a head has hidden states of all tokens"
        self._mtp.follow(self._runner, table, layout, computed.normed)
        return computed

    def accept_drafts(self, num_accepted: Int32Array) -> None:
        """Let the states take the first drafts of each row; see `Runner.accept_drafts`."""
        self._runner.accept_drafts(num_accepted)
        self._mtp.accept(num_accepted)


def adapters_of(model: LanguageModel) -> AdapterSlots | None:
    """Return the slots for adapters that a model has; None: it has none."""
    return model.adapters if isinstance(model, Decoder) else None


def wanted_tokens(layout: StepLayout) -> tuple[Int32Array, int, Int32Array]:
    """Return which tokens of a step matter behind its last layer.

    Returns:
        Indices of flat tokens, [num_wanted]: first the tokens that logits are sampled of, each once, then the tokens
        before prompt tokens with wanted log-probabilities; how many the first are; and which of them each sample row
        uses, [num_samples].
    """
    counts = layout.num_prompt_logprobs
    if len(layout.sample_rows) == layout.num_decodes == len(layout.slots):
        return layout.sample_rows, layout.num_decodes, layout.sample_rows  # a token a row, and all are sampled
    # The token at a position is drawn behind the token before it.
    begins = np.cumsum(layout.lengths) - layout.lengths - layout.starts
    wanted, logit_rows = np.unique(begins[layout.sample_rows] + layout.sample_positions - 1, return_inverse=True)
    num_logit_rows = len(wanted)
    if counts is not None:
        wanted = np.concatenate((wanted, _first_tokens(layout.lengths, counts)))
    return wanted.astype(np.int32), num_logit_rows, logit_rows.astype(np.int32)


def prepare_input(table: BatchTable, layout: StepLayout | MtpRows, last_tokens: LastTokens) -> ModelInput:
    """Lay the tokens of all rows flat, in row order."""
    tokens, device = StepTokens.of(layout), last_tokens.device
    slots, positions = tokens.slots, tokens.positions
    return ModelInput(
        token_ids=last_tokens.fill_in(table.token_ids[slots, positions], slots, positions),
        positions=index_to_device(positions, device),
        attention=[
            AttentionMetadata(
                starts=layout.starts,
                lengths=layout.lengths,
                block_tables=group.block_ids[layout.slots, : -(-tokens.longest // group.block_size)],
                slot_mapping=index_to_device(group.places_of(slots, positions), device),
            )
            for group in table.groups
        ],
    )


def _first_tokens(lengths: Int32Array, counts: Int32Array) -> npt.NDArray[np.int64]:
    """Return which of the flat tokens are the first `counts` of their rows; both are [num_rows]."""
    begins = np.cumsum(lengths) - lengths
    indices: npt.NDArray[np.int64] = np.arange(counts.sum()) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
    return indices
