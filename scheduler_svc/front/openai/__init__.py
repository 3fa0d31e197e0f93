"""OpenAI's API over HTTP: /v1/chat/completions, /v1/completions, and what clients and operators ask beside them.

    JSON ── fields ──> requests.py ── GenerateRequest ──> Generation (scheduler_svc/front/api/) ──> engine
    JSON, SSE <── chat.py, completions.py <── Response <──────────────┘

`server.py` is the port, `routing.py` what stands around every answer: who calls, the body, errors. `fields.py` says
what becomes of each field of a request; the ranges of values are checked by the native API, whose sentences come back
in the shape of OpenAI's errors (`errors.py`). Nothing outside of here knows HTTP.
"""
