"""A request as front, engine and core know it: values, and the interface of the engine.

`parameters.py` and `engine_request.py` have the request, `outputs.py` and `provenance.py` its results, `life.py` its
events and its end. `served_model.py` is the model that it is checked against, `engine_client.py` the interface. No
module here imports another package of the scheduler.
"""
