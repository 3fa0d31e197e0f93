"""The step log: every call into the fleet, in files, so that `octavo replay` can decide all of it again."""
