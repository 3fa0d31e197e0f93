"""Grammars that outputs follow, and the matcher: fronts refuse requests by it, executors mask tokens by it."""
