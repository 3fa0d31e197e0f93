"""What writes the reference pages from the code; `docs.tools.reference` is where it begins."""
