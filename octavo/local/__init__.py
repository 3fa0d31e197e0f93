"""Services that the client starts on this machine."""
