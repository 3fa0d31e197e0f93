"""The blocks of a planner: who has which, which are cached, which are on the host."""
