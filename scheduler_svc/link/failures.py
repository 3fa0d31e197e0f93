"""Errors on their way between front and engine.

The receiver sees what was raised: class, sentence and attributes.
"""

import inspect
import json

from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared import errors
from octavo_shared.errors import OctavoServiceError

_KINDS: dict[str, type[OctavoServiceError]] = {
    name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, OctavoServiceError)
}


def encode_failure(error: OctavoServiceError) -> pb.Failure:
    """Return the message of an error."""
    kind, *base_kinds = (base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS)
    attributes = json.dumps(vars(error), default=str)
    return pb.Failure(kind=kind, message=str(error), attributes_json=attributes, base_kinds=base_kinds)


def decode_failure(message: pb.Failure) -> OctavoServiceError:
    """Return the error in a message; one of a class that is not known here is one of the nearest class that is."""
    kinds = (_KINDS[name] for name in (message.kind, *message.base_kinds) if name in _KINDS)
    kind = next(kinds, OctavoServiceError)
    error = kind.__new__(kind)
    error.args = (message.message,)
    vars(error).update(json.loads(message.attributes_json or "{}"))
    return error
