"""Anthropic's Messages API over HTTP: /v1/messages and /v1/messages/count_tokens, as the chat that a request asks for.

    JSON ── fields.py ──> conversation.py, tools.py ── ChatFields ──> scheduler_svc/front/openai/ ──> Generation
    JSON, SSE <── messages.py, streaming.py <── blocks.py <── what the parser of chats finds in an output

Only the shapes are here: fields, blocks, events, errors (`errors.py`). Checks, parsers and grammars are those of chats.
"""
