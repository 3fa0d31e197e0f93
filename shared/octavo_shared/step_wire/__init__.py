"""The step between scheduler and executor: its types, its message, the batch table that it changes."""
