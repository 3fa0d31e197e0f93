"""Errors on their way between front and core: whoever gets one sees what was raised, class, sentence and attributes."""

import inspect
import json

from octavo.core.v1 import core_service_pb2 as pb
from shared import errors
from shared.errors import OctavoServiceError

_KINDS: dict[str, type[OctavoServiceError]] = {
    name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, OctavoServiceError)
}


def encode_failure(error: OctavoServiceError) -> pb.Failure:
    """Return the message of an error."""
    kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS)
    return pb.Failure(kind=kind, message=str(error), attributes_json=json.dumps(vars(error), default=str))


def decode_failure(message: pb.Failure) -> OctavoServiceError:
    """Return the error in a message; one of a class that is not known here is an `OctavoServiceError`."""
    kind = _KINDS.get(message.kind, OctavoServiceError)
    error = kind.__new__(kind)
    error.args = (message.message,)
    vars(error).update(json.loads(message.attributes_json or "{}"))
    return error
