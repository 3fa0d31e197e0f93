"""The scheduler's pure core: values in, values out; no transport, clock, randomness or logging."""
