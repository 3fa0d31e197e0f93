"""What runs a step: batch table, layout, forward pass, sampled tokens."""
