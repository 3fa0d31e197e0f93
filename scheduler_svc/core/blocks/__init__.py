"""The blocks of a core: who has which, which are cached, which are on the host."""
