"""The tokenizer's files as a gateway takes them: a zip in chunks, its digest on the last one."""

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated import common_pb2

from scheduler_svc.front.text.text_model import TextModel

CONFIG = "config.json"

# Below the 4 MiB that a gRPC client takes by default.
CHUNK_BYTES = 2**20

# Equal files make equal archives, whenever they are made: the earliest date that a zip can hold.
ZIP_DATE = (1980, 1, 1, 0, 0, 0)


class TokenizerArchive:
    """The archive of the served model, in chunks: made once for each model, in a thread."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._model: TextModel | None = None
        self._chunks: Sequence[common_pb2.GetTokenizerChunk] = ()

    async def chunks(self, model: TextModel) -> Sequence[common_pb2.GetTokenizerChunk]:
        """Return the messages for a model; those of the last one are kept."""
        async with self._lock:  # calls that come together wait for one archive
            if model != self._model:
                self._chunks = await asyncio.to_thread(_make_chunks, model)
                self._model = model
            return self._chunks


def _make_chunks(model: TextModel) -> Sequence[common_pb2.GetTokenizerChunk]:
    return tuple(archive_chunks(tokenizer_archive(model)))


def tokenizer_archive(model: TextModel) -> bytes:
    """Return the zip: the tokenizer's files, and a config.json with what the scheduler knows of the model."""
    contents = {CONFIG: model_config(model)} | {file.name: file.content for file in model.tokenizer.files}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(contents.items()):
            archive.writestr(zipfile.ZipInfo(name, ZIP_DATE), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def model_config(model: TextModel) -> bytes:
    """Return a config.json in the terms of transformers, without what only an executor knows."""
    config = {
        "vocab_size": model.info.vocab_size,
        "max_position_embeddings": model.max_model_len,
        "eos_token_id": list(model.info.eos_token_ids),
    }
    return json.dumps(config).encode()


def archive_chunks(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Cut an archive into messages; the last one has the SHA-256 of the whole, in hexadecimal."""
    for begin in range(0, len(archive), CHUNK_BYTES):
        data = archive[begin : begin + CHUNK_BYTES]
        is_last = begin + CHUNK_BYTES >= len(archive)
        yield common_pb2.GetTokenizerChunk(data=data, sha256=hashlib.sha256(archive).hexdigest() if is_last else "")
