"""Replays a step log: decides every step again (`octavo replay`)."""
