"""Beam search: on candidates alone, and in the slots of a batch."""
