#!/usr/bin/env python3
"""A program with the command line and the HTTP interface of llama-server, as far as the adapter uses them."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == [1]:
            self._answer({"error": "no such token"}, status=400)
            return
        self._answer({"tokens_predicted": body["n_predict"], "timings": {"predicted_ms": 0.01}})

    def _answer(self, message: object, status: int = 200) -> None:
        data = json.dumps(message).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
