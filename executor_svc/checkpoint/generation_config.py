"""What a model's generation_config.json says of sampling: the defaults of requests that do not set it."""

import logging
from collections.abc import Mapping
from pathlib import Path

from octavo.values.sampling_params_table import SAMPLING_PARAMS
from octavo_shared.process.events import Event

_logger = logging.getLogger(__name__)


def sampling_defaults(config: Mapping[str, object], path: Path) -> dict[str, float]:
    """Return the parameters that the file sets, by name.

    `do_sample` false means greedy, as in transformers; where it is absent, the file does not say how to decode, and
    its other numbers hold. A value that no request may have is left out, with a line in the log.

    Args:
        config: The content of the file.
        path: Of the file, for the log.
    """
    defaults: dict[str, float] = {}
    for parameter in SAMPLING_PARAMS:
        value = config.get(parameter.name) if parameter.may_model_set else None
        if value is None:
            continue
        types = (int,) if parameter.is_whole else (int, float)
        if isinstance(value, types) and not isinstance(value, bool) and parameter.allows(value):
            defaults[parameter.name] = value
        else:
            fields = {"file": str(path), "field": parameter.name, "value": repr(value), "must_be": parameter.limit}
            _logger.warning(Event("model_default_ignored", **fields))
    if config.get("do_sample") is False:
        defaults["temperature"] = 0
    return defaults
