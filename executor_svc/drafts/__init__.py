"""Drafts: tokens that may come next, computed beside the last one of a sequence and kept where the draw is equal."""
