"""The groups that wait: one queue, lines of tenants, who goes first."""
