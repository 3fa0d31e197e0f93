"""The models that the executor runs.

`families/` reads a config.json into a `ModelConfig` (config.py), `decoder.py` is the model, `decoder_weights.py` makes
its weights, `dense.py` and `torch_dense.py` compute what is between the attentions, `rotary.py` the positions,
`sharding.py` says what a tensor-parallel rank has of it all.
"""

from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.families import FAMILIES, parse_config

__all__ = ["FAMILIES", "Decoder", "ModelConfig", "parse_config"]
