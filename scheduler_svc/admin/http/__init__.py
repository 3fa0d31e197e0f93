"""The port of the live page (--page-listen), HTTP/1.1: the page, and `AdminService` as JSON.

Read `page_server.py` first. Then

- `json_transcoder.py`: a call with JSON becomes a call of the servicer;
- `scheduler_svc/http/`: connections, TLS, and what keeps other web sites out;
- `scheduler_svc/front/access/http_access.py`: the caller's identity.
"""
