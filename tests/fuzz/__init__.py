"""Fuzzers: hostile bytes for whatever reads bytes of others."""
