"""Several processes that run one model together: a tensor-parallel group. Begin with `group.py`, its collectives.

Rank 0 serves gRPC and sends every step to the other ranks over sockets, so that a group may be idle for as long as it
likes; collectives belong to the forward pass alone. `connection.py` is a socket, `rank_channel.py` joins those of all
ranks at rank 0, `ranks.py` says which rank a process is and starts ranks on one machine, `rendezvous.py` brings them
together. `executor_svc/worker/rank_process.py` and `rank_worker.py` run the steps of a rank.
"""
