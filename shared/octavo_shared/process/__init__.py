"""What each process of a service has: settings, events, metrics, tracing, an end."""
