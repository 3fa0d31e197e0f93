from collections.abc import Sequence
from typing import cast

from executor_svc.fake.worker import FakeWorker
from octavo_shared.step_wire.executor_info import TokenizerFile
from scheduler_svc.front.text.text_model import ModelTokenizer
from scheduler_svc.request.served_model import ServedModel
from tests.support.tokenizers import byte_level_backend, make_tokenizer

SERVED = cast("ServedModel", None)


async def test_a_tokenizer_is_built_again_only_for_other_files() -> None:
    worker, tokenizer = FakeWorker(num_device_blocks=1, max_num_seqs=1), ModelTokenizer()

    async def load(files: Sequence[TokenizerFile]) -> object:
        async def fetch() -> Sequence[TokenizerFile]:
            return files

        await tokenizer.load(worker.info, fetch)
        return tokenizer.model(SERVED).tokenizer

    first = await load(worker.tokenizer_files())
    assert await load(list(worker.tokenizer_files())) is first
    assert await load(make_tokenizer(byte_level_backend()).files) is not first
