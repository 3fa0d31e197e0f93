"""The executor's process and its gRPC service: attachments, step streams, the thread that runs steps."""
