"""Where a release up to 0.1.0 has modules of the client: its processes import them by the names of today."""

import importlib
import importlib.util
import sys

if importlib.util.find_spec("octavo.values") is None:
    sys.modules["octavo.values"] = importlib.import_module("octavo")
    sys.modules["octavo.values.outputs"] = importlib.import_module("octavo.outputs")
