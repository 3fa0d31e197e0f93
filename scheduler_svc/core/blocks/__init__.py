"""The blocks of a planner: which sequence has which, which are cached, which are on the host."""
