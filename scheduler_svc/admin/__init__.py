"""What operators see: `AdminService`, why a request waits, and the port that serves it."""
