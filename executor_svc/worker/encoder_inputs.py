"""The inputs of an encoder in a step: what is computed of them, and where the batch table says that they lie."""

from collections.abc import Sequence

import numpy as np

from executor_svc.attention.interface import AttentionBackend, LayerCache
from executor_svc.models.encoder_decoder import EncodedInputs, EncoderDecoder
from executor_svc.models.language_model import LanguageModel
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.step import EncoderInput
from octavo_shared.step_wire.table_columns import BlockTables


def encode_inputs(
    model: LanguageModel,
    caches: Sequence[LayerCache],
    backend: AttentionBackend,
    inputs: Sequence[EncoderInput],
    tables: BlockTables,
) -> None:
    """Run the encoder of a model; see `Runner.encode`."""
    assert isinstance(model, EncoderDecoder), "no other model has one"
    texts = [given.token_ids for given in inputs if given.token_ids is not None]
    lengths = np.array([given.num_tokens for given in inputs], np.int32)
    block_tables = np.zeros((len(inputs), max(len(given.block_ids) for given in inputs)), np.int32)
    for row, given in zip(block_tables, inputs, strict=True):
        row[: len(given.block_ids)] = given.block_ids - np.int32(tables.first_id)
    model.encode(texts, EncodedInputs(lengths, block_tables, tables.block_size), caches, backend)


def inputs_of(table: BatchTable, layout: StepLayout) -> EncodedInputs:
    """Return where the inputs of the rows of a step lie."""
    assert table.encoder is not None, "the model has an encoder"
    lengths = table.num_encoder_tokens[layout.slots]
    num_blocks = -(-int(lengths.max()) // table.encoder.block_size)
    return EncodedInputs(lengths, table.encoder.block_ids[layout.slots, :num_blocks], table.encoder.block_size)
