"""HTTP/1.1 on the admin port: the live page, and `AdminService` as JSON.

Read `http_server.py` first. Then

- `json_transcoder.py`: a call with JSON becomes a gRPC call;
- `origin_checks.py`: keeps other web sites out;
- `http_tls.py`, `forwarded_client_cert.py`: certificates over HTTP, and what a verified one is worth.
"""
