"""The processes of the scheduler: the engine, its fronts, and their supervisor."""
