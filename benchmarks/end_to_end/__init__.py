"""Octavo's whole stack beside every engine that is installed, in one run: `make bench`.

    python -m benchmarks.end_to_end [--quick] [--rounds 3] [--engines ...] [--formats ...] [--workloads ...]

Reading order: `workloads.py` has what is computed, `engines.py` the engines. `adapters/` runs one engine in a process
of its own, `engine_process.py` is our end of it. `session.py` lets the engines take turns and `result.py` is what it
writes down. `tables.py` makes figures and tables of it, `pages.py` shows them. `limits.py` measures
what the machine could do. `peers.py` installs the other engines.

Packages of other engines are imported in `adapters/` only, and nothing but the standard library is imported there at
the top of a module: each adapter runs with the interpreter of its engine.
"""
