"""Who makes a call, and what they may do."""
