"""What every HTTP port of the scheduler needs, below any path: connections, TLS, which sites may call.

- `http_port.py`, `listeners.py`: opens the address, accepts connections;
- `connections.py`: HTTP/1.1 on a connection; closes connections that are silent or stall;
- `http_tls.py`: certificates over HTTP;
- `origin_checks.py`: keeps other web sites out;
- `page.py`: a page and its policy.

The live page (`scheduler_svc/admin/http/`) and OpenAI's API (`scheduler_svc/front/openai/`) are built on it.
"""
