"""The executor service: the paged KV cache, the model and the sampler behind `ExecutionService`."""
