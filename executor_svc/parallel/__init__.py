"""Several processes that run one model together: a tensor-parallel group.

Rank 0 serves gRPC and sends every step to the other ranks over sockets, so that a group may be idle for
as long as it likes; collectives belong to the forward pass alone. `connection.py` is the socket,
`step_channel.py` joins all of them at rank 0, `rank_worker.py` runs the steps at both ends, `ranks.py` says
which rank a process is, `local_ranks.py` starts those of one machine, `group.py` has the collectives.
"""
