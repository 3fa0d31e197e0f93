"""HTTP/1.1 on the admin port: the live page, and `AdminService` as JSON.

Read `http_server.py` first. Then

- `json_transcoder.py`: a call with JSON becomes a gRPC call;
- `forwarded_client_cert.py`: what a verified client certificate is worth;
- `scheduler_svc/http/`: connections, TLS, and what keeps other web sites out.
"""
