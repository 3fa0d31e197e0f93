"""What every HTTP port of the scheduler needs, below any path: connections, TLS, which sites may call.

- `listeners.py`, `acceptor.py`: open the address, accept connections;
- `protocol_detection.py`, `client_hello.py`: gRPC or HTTP, from the first bytes of a connection;
- `connections.py`: HTTP/1.1 on a connection, and the ends of those that are silent or stall;
- `http_tls.py`: certificates over HTTP;
- `origin_checks.py`: keeps other web sites out.

The admin port (`scheduler_svc/admin/`) and OpenAI's API (`scheduler_svc/front/openai/`) stand on it.
"""
