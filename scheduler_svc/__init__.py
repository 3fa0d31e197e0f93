"""The scheduler service: queues, block tables, policy, streams. CPU only, never torch."""
