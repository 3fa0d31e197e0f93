"""From logits to tokens, vectorised over the sample rows; each stage works on the rows that ask for it.

    sampler.py      the order of the stages; begin here
    sample_rows.py  how each row is sampled, its history, its draw; without torch
    logprobs.py     log-probabilities of the raw logits, before anything changes them
    processors.py   biases, penalties, tokens that may not come
    filters.py      temperature, top-k, top-p, min-p, typical-p: which tokens are left
    drawing.py      one token of what is left
    likeliest.py    the largest of a row, found by blocks
    device_sampling.py  filters and draw in one Triton kernel, for a GPU

Nothing of a row's result depends on the other rows, down to the last bit: sums run over fixed blocks.
"""
