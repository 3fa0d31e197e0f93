"""What attention in plain torch can do: everything, on every device."""

from executor_svc.attention.needs import AttentionNeeds


class TorchRules:
    """The rules of `TorchAttentionBackend`; see `BackendRules`."""

    name = "torch"
    preferred_block_size = 16

    def why_not_block_size(self, block_size: int) -> str | None:
        """Return None: it gathers whole blocks, whatever their size."""
        del block_size
        return None

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Return None: it is the reference."""
        del needs
        return None
