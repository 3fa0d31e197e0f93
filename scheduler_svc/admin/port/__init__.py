"""The admin port: gRPC and HTTP/1.1 on one address, for tools and for a browser.

Read `port.py` first: who listens, and what becomes of a connection. Then

- `reception.py`: accepts; `recognition.py`, `client_hello.py`: what the first bytes of a connection say;
- `splices.py`, `socket_directory.py`: the way of a gRPC client to the gRPC server behind the port;
- `http_side.py`: what a browser and curl get, with `page.py`, `page_document.py`, `json_calls.py`,
  `browser_rules.py`;
- `http_tls.py`, `voucher.py`: certificates over HTTP, and what a verified one is worth.
"""
