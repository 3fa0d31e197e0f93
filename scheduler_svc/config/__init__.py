"""The settings of the scheduler and of its fronts."""
