"""The groups that wait: one queue, with a line for each tenant, and its order."""
