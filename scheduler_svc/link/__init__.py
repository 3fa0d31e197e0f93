"""What joins fronts to a core in another process: `octavo.core.v1`.

    front process                                   core's process
    Generation ──> RemoteCore ══ Join (stream) ══> CoreServicer ──> Engine
                   the EngineClient of a front      one FrontSession each

The front has the same interface as in the core's own process, `request/engine_client.py`. Next: `remote_core.py`,
`core_servicer.py`; the other files turn values into messages and back.
"""
