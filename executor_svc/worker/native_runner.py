"""From a step's layout to logits on a CPU where the C library runs the whole model: one call, no tensors.

The library reads the batch table in place. See `model_runner.py` for the same with any model.
"""

from collections.abc import Callable, Sequence
from ctypes import Array, addressof

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.adapters.slots import using
from executor_svc.adapters.step_rows import StepRows
from executor_svc.drafts.mtp import MtpResult, MtpRows
from executor_svc.models.language_model import LanguageModel
from executor_svc.models.native_forward import NativeForward
from executor_svc.native.structs import BatchStruct, BlockTablesStruct, StepRowsStruct
from executor_svc.states.interface import StateRows
from executor_svc.states.live_states import AcceptedDrafts, state_rows
from executor_svc.worker.model_runner import SampleLogits, adapters_of, wanted_tokens
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.step import EncoderInput, Int32Array
from octavo_shared.step_wire.table_columns import BlockTables

Encode = Callable[[Sequence[EncoderInput], BlockTables], None]


class NativeRunner:
    """Runs a model on the caches that its call knows; see `Runner`.

    Args:
        model: For what is no part of a step's one call: logits of prompts.
        forward: The call.
        max_num_seqs: Most rows of a step.
        mtp: The call of a head that drafts; None: there is none.
        encode: Runs the encoder, if the model has one; see `Runner.encode`.
    """

    def __init__(
        self,
        model: LanguageModel,
        forward: NativeForward,
        max_num_seqs: int,
        mtp: NativeForward | None,
        encode: Encode,
    ) -> None:
        self.model = model
        self.encode = encode
        self._forward = forward
        self._batch = BatchStruct()
        self._tables: Array[BlockTablesStruct] = (BlockTablesStruct * 0)()
        # The last step, which the batch points into. Decodes of the same sequences differ in where they start alone.
        self._prepared: tuple[BatchTable, StepLayout, bool] | None = None
        self._computed = SampleLogits(None, np.empty(0, np.int32))
        self._wanted = np.empty(0, np.int32)
        # What steps write is kept, so that no step pays for page faults again.
        self._hidden = torch.empty(0, forward.hidden_size)
        self._logits = torch.empty(0, forward.vocab_size)
        self._likeliest = np.empty(max_num_seqs, np.int32)
        self._starts = np.empty(max_num_seqs, np.int32)
        self._draft_inputs = torch.empty(0)
        self._encoded: Int32Array = np.empty((3, 0), np.int32)  # of the last step, as `_rows_of_encoder` returns it
        self._mtp = mtp
        self._normed = torch.empty(0, forward.hidden_size)
        self._rows: StateRows | None = None  # of the last step, if the model has states
        self._adapters = adapters_of(model)
        self._adapter_rows: StepRows | None = None  # of the last step

    def run(self, table: BatchTable, layout: StepLayout, *, finds_likeliest: bool) -> SampleLogits:
        """Compute the tokens of a step; see `Runner.run`."""
        if not self._is_prepared(table, layout, finds_likeliest):
            self._prepare(table, layout, finds_likeliest)
        self._starts[: len(layout.starts)] = layout.starts
        if self._adapters is None:
            self._forward(self._batch)
        else:
            with using(self._adapters, self._adapter_rows):
                self._forward(self._batch)
        return self._computed

    def accept_drafts(self, num_accepted: Int32Array) -> None:
        """Let the states take the first drafts of each row; see `Runner.accept_drafts`."""
        if self._rows is not None and num_accepted.any():
            self._forward.accept_drafts(AcceptedDrafts.of(self._rows, num_accepted), self._draft_inputs)

    def run_mtp(self, table: BatchTable, rows: MtpRows) -> MtpResult | None:
        """Run the head that drafts; see `MtpRunner.run_mtp`."""
        assert self._mtp is not None, "else it is not asked"
        num_rows, tables = len(rows.slots), _tables(table)
        num_wanted, wanted = num_rows if rows.has_drafts else 0, np.arange(num_rows, dtype=np.int32)
        hidden, normed = torch.empty(2, num_wanted, self._forward.hidden_size)
        logits, likeliest = torch.empty(num_wanted, self._forward.vocab_size), np.empty(num_wanted, np.int32)
        self._mtp(
            BatchStruct(
                token_ids=_address(table.token_ids),
                tables=addressof(tables),
                max_model_len=table.max_model_len,
                num_groups=len(table.groups),
                num_rows=num_rows,
                slots=_address(rows.slots),
                starts=_address(rows.starts),
                lengths=_address(rows.lengths),
                wanted=_address(wanted),
                num_wanted=num_wanted,
                num_logit_rows=num_wanted,
                previous=rows.previous.data_ptr(),
                hidden=hidden.data_ptr(),
                normed=normed.data_ptr(),
                logits=logits.data_ptr(),
                likeliest=_address(likeliest),
            )
        )
        return MtpResult(normed, likeliest) if rows.has_drafts else None

    def _is_prepared(self, table: BatchTable, layout: StepLayout, finds_likeliest: bool) -> bool:
        """Return whether the step decodes the same sequences as the last one: then nothing in the batch changes."""
        if self._prepared is None or not layout.only_decodes:
            return False
        last_table, last_layout, found_likeliest = self._prepared
        is_alike = last_table is table and last_layout.slots is layout.slots and last_layout.only_decodes
        return is_alike and found_likeliest == finds_likeliest

    def _prepare(self, table: BatchTable, layout: StepLayout, finds_likeliest: bool) -> None:
        """Point to the rows of a step, and to where its results go."""
        self._prepared = table, layout, finds_likeliest
        self._wanted, num_logit_rows, logit_rows = wanted_tokens(layout)
        num_asked = len(self._wanted)
        if self._mtp is not None:
            self._wanted = np.concatenate((self._wanted, np.arange(layout.lengths.sum(), dtype=np.int32)))
            if len(self._normed) < len(self._wanted):
                self._normed = torch.empty(len(self._wanted), self._forward.hidden_size)
        num_wanted = len(self._wanted)
        if self._adapters is not None:
            self._adapter_rows = StepRows.of(self._adapters.of_sequences[layout.slots], layout.lengths, self._wanted)
        if self._hidden.shape[0] < num_wanted:
            self._hidden = torch.empty(num_wanted, self._forward.hidden_size)
        if self._logits.shape[0] < num_logit_rows:
            self._logits = torch.empty(num_logit_rows, self._forward.vocab_size)
        if len(self._likeliest) < num_logit_rows:  # a row with drafts has several
            self._likeliest = np.empty(num_logit_rows, np.int32)
        self._tables = _tables(table)
        commits, draft_inputs = self._prepare_drafts(layout)
        self._encoded = _rows_of_encoder(table, layout) if table.encoder is not None else np.empty((3, 0), np.int32)
        self._batch = BatchStruct(
            token_ids=_address(table.token_ids),
            tables=addressof(self._tables),
            max_model_len=table.max_model_len,
            num_groups=len(table.groups),
            num_rows=len(layout.slots),
            slots=_address(layout.slots),
            starts=_address(self._starts),
            lengths=_address(layout.lengths),
            commits=commits,
            wanted=_address(self._wanted),
            num_wanted=num_wanted,
            num_logit_rows=num_logit_rows,
            hidden=self._hidden.data_ptr(),
            normed=None if self._mtp is None else self._normed.data_ptr(),
            logits=self._logits.data_ptr(),
            likeliest=_address(self._likeliest) if finds_likeliest else None,
            draft_inputs=draft_inputs,
            encoded=StepRowsStruct(self._encoded.shape[1], *map(_address, self._encoded)),
        )
        self._computed = SampleLogits(
            self._logits[:num_logit_rows],
            logit_rows,
            None if layout.num_prompt_logprobs is None else self._hidden[num_logit_rows:num_asked],
            self._likeliest[:num_logit_rows] if finds_likeliest else None,
            None if self._mtp is None else self._normed[num_asked:num_wanted],
        )

    def _prepare_drafts(self, layout: StepLayout) -> tuple[int | None, int | None]:
        """Point to what the states take of each row, and to where the inputs of drafts are kept, if there are any."""
        width = self._forward.draft_width
        self._rows = rows = state_rows(layout) if width else None
        if rows is None or rows.commits is None:
            return None, None
        size = int((rows.lengths - rows.commits).sum()) * width
        if len(self._draft_inputs) < size:
            self._draft_inputs = torch.empty(size)
        return _address(rows.commits), self._draft_inputs.data_ptr()


def _rows_of_encoder(table: BatchTable, layout: StepLayout) -> Int32Array:
    """Return slot, start and length of each token as a row at the end of an encoder's input, [3, num_tokens]."""
    slots = np.repeat(layout.slots, layout.lengths)
    return np.stack((slots, table.num_encoder_tokens[slots] - 1, np.ones_like(slots)))


def _tables(table: BatchTable) -> Array[BlockTablesStruct]:
    """Return where the block tables of each cache group are."""
    groups = table.all_tables
    tables = (BlockTablesStruct * len(groups))()
    for struct, group in zip(tables, groups, strict=True):
        struct.block_ids, struct.width = _address(group.block_ids), group.block_ids.shape[1]
        struct.block_size = group.block_size
    return tables


def _address(array: npt.NDArray[np.int32]) -> int:
    assert array.flags.c_contiguous, "the library counts on numbers that lie one after the other"
    assert array.dtype == np.int32, "the library counts on int32"
    return array.ctypes.data
