"""The models that the executor runs.

`families/` reads a config.json into a `ModelConfig` (config.py), `decoder.py` is the model, `decoder_weights.py` makes
its weights, `dense.py` and `torch_dense.py` compute what is between the attentions, `rotary.py` the positions,
`sharding.py` says what a tensor-parallel rank has of it all.
"""
