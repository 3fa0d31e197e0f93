"""OpenAI's API over HTTP: /v1/chat/completions, /v1/completions, and what clients and operators ask beside them.

    JSON ── fields ──> requests.py ── GenerateRequest ──> Generation (scheduler_svc/front/api/) ──> engine
    JSON, SSE <── chat.py, completions.py <── Response <──────────────┘

`set_up.py` is the port, `routing.py` does what every answer needs: access, the body, errors. `fields.py` says what
becomes of each field of a request; the native API checks the ranges of values, and its errors come back in OpenAI's
shape (`errors.py`). Nothing outside of this package knows HTTP.
"""
