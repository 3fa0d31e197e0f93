"""A step: admissions, decodes, prefills, preemptions, and results."""
