"""Grammars that outputs follow: what they are, and the matcher that fronts refuse by and executors mask by."""
