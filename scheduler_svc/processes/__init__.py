"""The processes of the scheduler: the one that serves, its fronts, and who starts them."""
