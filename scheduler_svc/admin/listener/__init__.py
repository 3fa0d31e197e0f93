"""The admin port: gRPC and HTTP/1.1 on one address, for tools and for a browser.

Read `admin_port.py` first: who listens, and what becomes of a connection. Then

- `scheduler_svc/http/`: opens the address, accepts connections, detects their protocol;
- `tcp_proxy.py`, `socket_directory.py`: a gRPC client's way to the gRPC server behind the port;
- `scheduler_svc/admin/http/`: what a browser and curl get.
"""
