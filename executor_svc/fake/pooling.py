"""The vectors and scores of the fake executor: a hash of tokens and their types, so that tests can check them."""

import hashlib

import numpy as np

from octavo_shared.step_wire.step import Float32Array, PoolingInput, PoolingOutput, PoolingTask, RowFlag

EMBEDDING_SIZE = 16
NUM_SCORES = 1


def fake_values(task: PoolingTask, token_ids: list[int], token_type_ids: bytes = b"") -> Float32Array:
    """Return the vector of a text, of length 1, or its score, 0 to 1."""
    tokens = np.array(token_ids, "<i4").tobytes()
    digest = hashlib.sha512(bytes([task]) + tokens + token_type_ids.rstrip(b"\0")).digest()
    numbers = np.frombuffer(digest, "<u4").astype(np.float64) / 2**32
    if task is PoolingTask.SCORE:
        return numbers[:NUM_SCORES].astype(np.float32)
    vector = 2 * numbers[:EMBEDDING_SIZE] - 1
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def pool(text: PoolingInput, nan_token_id: int) -> PoolingOutput:
    """Return the answer to a text; a text with the token that makes NaN gets a flag."""
    token_ids = text.token_ids.tolist()
    values = fake_values(text.task, token_ids, text.token_type_ids)
    if nan_token_id >= 0 and nan_token_id in token_ids:
        return PoolingOutput(text.number, np.full_like(values, np.nan), RowFlag.NOT_FINITE)
    return PoolingOutput(text.number, values)
