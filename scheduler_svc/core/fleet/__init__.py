"""Several executors, one queue: which group is computed where."""
