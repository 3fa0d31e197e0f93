"""Low-rank adapters: their files, the slots that hold them, and what they add to the products of a model."""
