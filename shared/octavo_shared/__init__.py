"""What both services import: the batch table, steps, the wire, errors, configuration, the gRPC server."""
