"""The executor's process and its gRPC service. Begin with `servicer.py`.

`attachment.py` says which scheduler owns the executor, `step_stream.py` and `step_runner.py` run its steps.
"""
