"""Scenes of calls, played on grpc.aio and on the simulated network; see `tests/simulation/test_network.py`."""
