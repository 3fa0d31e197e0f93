"""How a front gets the tokenizer's files, which the engine keeps."""

from typing import TYPE_CHECKING, Any

import grpc.aio

from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared.errors import MalformedMessageError, UnavailableError
from octavo_shared.grpc.grpc_status import failure_text
from octavo_shared.step_wire.executor_info import TokenizerFile

if TYPE_CHECKING:
    from octavo.core.v1 import core_service_pb2_grpc as pb_grpc


async def fetch_tokenizer(stub: "pb_grpc.CoreServiceAsyncStub") -> tuple[TokenizerFile, ...]:
    """Fetch the files. Raises UnavailableError: the engine does not give them."""
    contents: dict[str, bytearray] = {}
    chunk: Any
    try:
        async for chunk in stub.GetTokenizer(pb.GetTokenizerRequest()):
            if isinstance(chunk, MalformedMessageError):
                raise UnavailableError(
                    "the engine answered GetTokenizer with a message that cannot be decoded"
                ) from chunk
            contents.setdefault(chunk.name, bytearray()).extend(chunk.content)
    except grpc.aio.AioRpcError as error:
        raise UnavailableError(f"the engine did not send the tokenizer files: {failure_text(error)}") from error
    return tuple(TokenizerFile(name, bytes(content)) for name, content in contents.items())
