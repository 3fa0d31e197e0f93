"""From logits to tokens and log-probabilities, vectorised over the sample rows.

    sampler.py         what a step asks for; begin here
    sample_rows.py     how each row is sampled, its history, its draw; without torch
    interface.py       what a backend does with logits
    native_backend.py  all of it in C, for logits on a CPU
    torch_backend.py   all of it in torch, for every device: the reference. Its stages, in their order:
      processors.py    biases, penalties, tokens that may not come
      filters.py       temperature, top-k, top-p, min-p, typical-p: which tokens are left
      drawing.py       one token of what is left
      logprobs.py      log-probabilities of the raw logits
      likeliest.py     the largest of a row, found by blocks
    device_sampling.py filters and draw in one Triton kernel, for a GPU

Nothing of a row's result depends on the other rows, down to the last bit: sums run over fixed blocks.
"""
