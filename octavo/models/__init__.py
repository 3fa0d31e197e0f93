"""The models that octavo prepares, pulls and finds on this machine."""
