"""OpenAI's Responses API, /v1/responses, as a chat: items in and out, and a stream of numbered events.

    JSON ── fields.py ──> conversation.py, tools.py ── chat ──> the way of /v1/chat/completions
    JSON, SSE <── endpoint.py <── items.py <── blocks of the answer <──────────────┘

Events and ids follow from the tokens and the response's id alone, so every front makes the same.
"""
