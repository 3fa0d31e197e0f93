"""What joins fronts to an engine in another process: `octavo.core.v1`.

    front process                                   engine's process
    Generation ──> RemoteEngine ══ Join (stream) ══> EngineServicer ──> Engine
                   the EngineClient of a front      one FrontSession each

The front has the same interface as in the engine's own process, `request/engine_client.py`. The link's port also has
AdminService, so that fronts make operators' calls (`remote_admin.py`). Next: `remote_engine.py`,
`engine_servicer.py`.
"""
