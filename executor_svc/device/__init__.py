"""The device of a rank, and the way to its memory."""
