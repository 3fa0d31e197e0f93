"""The models that the executor runs. Begin with `decoder.py`, which runs any `ModelConfig` (`config.py`).

`families/` reads a config.json into that, `decoder_weights.py` makes the weights, `sharding.py` says which part of
them a tensor-parallel rank has, and `encoder_decoder.py` has an encoder too. What is computed between the attentions is
in `dense.py`; `kernels.py` chooses whether torch, Triton or C computes it (`torch_dense.py`, `triton_dense.py`,
`native_dense.py`). Models without a family run through transformers' code (`transformers_*.py`); `selection.py`
decides.
"""
