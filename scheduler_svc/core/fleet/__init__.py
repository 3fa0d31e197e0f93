"""Several executors, one queue: who is computed where."""
