"""The served model, as requests are checked against it, and whether its outputs are reproducible."""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo_shared.step_wire.executor_info import ExecutorInfo


@dataclass(frozen=True, slots=True)
class Reproducibility:
    """Whether equal requests get equal outputs, to the bit, on every executor.

    Attributes:
        numerics_ids: Known numerics ids of the executors, sorted, each once.
        weights_digest: Digest of the model's weights; empty: no executor says it.
        why_not: Why outputs are not reproducible, in a few words; empty: they are.
    """

    numerics_ids: tuple[str, ...]
    weights_digest: str
    why_not: str

    @classmethod
    def of(cls, executors: Mapping[str, ExecutorInfo]) -> "Reproducibility":
        """Return the reproducibility of executors, by their addresses."""
        ids = {info.numerics_id for info in executors.values()}
        digests = {info.weights_digest for info in executors.values()}
        unknown = sorted(address for address, info in executors.items() if not (info.numerics_id and info.is_invariant))
        why_not = ""
        if unknown:
            why_not = f"the executor at {unknown[0]} is not batch-invariant"
            if reason := executors[unknown[0]].why_not_invariant:
                why_not += f": {reason}"
        elif len(ids) > 1:
            formats = sorted({info.kv_cache_dtype for info in executors.values()})
            why_not = f"the executors have {len(ids)} different numerics ids"
            if len(formats) > 1:
                why_not += f": their KV caches are in {' and '.join(name or 'unknown formats' for name in formats)}"
        elif len(digests) > 1:
            why_not = "the executors report different weight digests"
        return cls(tuple(sorted(filter(None, ids))), min(filter(None, digests), default=""), why_not)


NOTHING_KNOWN = Reproducibility((), "", "no executor has been attached yet")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind the engine, as the executor of the fleet with the longest sequences describes it.

    `max_model_len` is the longest sequence that is served, `max_num_seqs` the most sequences that run at once on
    one executor: each the largest over the executors that are attached or expected. `reproducibility` is of these too.
    `speculates`: whether any of them may bring several tokens of an output in a step; `speculation_may_change_outputs`:
    whether one that does is not invariant. `adapters`: the names that requests may have as `lora_adapter`. `former`:
    the hashes and digests of the same model with its weights of before, whose requests go on with those of now.
    """

    info: ExecutorInfo
    max_model_len: int
    max_num_seqs: int
    served_name: str | None = None
    reproducibility: Reproducibility = NOTHING_KNOWN
    speculates: bool = False
    speculation_may_change_outputs: bool = False
    adapters: tuple[str, ...] = ()
    former: tuple[tuple[str, str], ...] = ()

    def goes_on_with(self, model_hash: str, weights_digest: str) -> bool:
        """Whether what other weights have begun goes on with these, as far as they are known; "": they are not."""
        is_same = not model_hash or model_hash == self.info.model_hash
        digests = {weights_digest, self.reproducibility.weights_digest} - {""}
        if is_same and len(digests) < 2:
            return True
        return any(
            model_hash in ("", known_hash) and weights_digest in ("", digest) for known_hash, digest in self.former
        )

    @property
    def name(self) -> str:
        """The name by which clients know the model."""
        return self.served_name or self.info.model_id
