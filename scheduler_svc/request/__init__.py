"""A request as front, engine and core know it: values, and the interface of the engine.

`parameters.py` and `engine_request.py` are what is asked for, `outputs.py` and `provenance.py` what comes of it,
`life.py` what is known of it at its end. `served_model.py` is what it is checked against, `engine_client.py` the
interface. Nothing here imports another room.
"""
