"""What clients call: servicers, the checks of their requests, and the limits of what a request may hold."""
