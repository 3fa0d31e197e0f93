"""From logits to tokens and log-probabilities, vectorised over the sample rows.

    sampler.py         what a step asks for; begin here. On a CPU `NativeBackend` does all of it in C
    sample_rows.py     how each row is sampled, its history, its draw; without torch
    interface.py       what a backend does with logits
    torch_backend.py   all of it in torch: the reference; first biases, penalties, bans
      filters.py       temperature, top-k, top-p, min-p, typical-p, and one token of what is left
      likeliest.py     the largest of a row, found by blocks, and log-probabilities of the raw logits
    device_sampler.py  all of it for a GPU, which the host is ahead of
      device_sampling.py filters and draw in Triton

Nothing of a row's result depends on the other rows, down to the last bit: sums run over fixed blocks.
"""
