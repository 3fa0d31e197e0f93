"""Drive a fleet by hand in tests: a `VirtualFleet` of toy executors that count up."""

from collections.abc import Mapping

from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.waiting.policy import Policy
from scheduler_svc.request.provenance import UNKNOWN, Numerics
from tests.support.driving import name_of, small_limits
from tests.support.fleet import MakeFleet, Member, VirtualFleet
from tests.support.toy_executor import ToyExecutor, ToyNetwork, count_up

# Of executors that exchange blocks: these have to be known.
ALIKE = Numerics("numerics", "digest")


class FleetBench(VirtualFleet):
    """A fleet whose members are told by their limits alone; what is decided is executed at once.

    Args:
        all_limits: Of the members that are there from the beginning.
        policy: Of the queue and of the cores.
        tenant_weights: Of the queue.
        max_num_seqs_per_tenant: Of the queue.
        make_fleet: See `VirtualFleet`.
        network: Between the members.
    """

    def __init__(
        self,
        *all_limits: CoreLimits,
        policy: Policy | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        max_num_seqs_per_tenant: int | None = None,
        make_fleet: MakeFleet = Fleet,
        network: ToyNetwork | None = None,
    ) -> None:
        self.network = network or ToyNetwork()
        super().__init__(policy, tenant_weights, max_num_seqs_per_tenant=max_num_seqs_per_tenant, make_fleet=make_fleet)
        for limits in all_limits:
            self.attach(limits, ALIKE if limits.max_transfers else UNKNOWN)

    def attach(self, limits: CoreLimits, numerics: Numerics = UNKNOWN) -> Member:
        """Let an empty toy executor join."""
        name = f"executor {len(self.members)}" if limits.max_transfers else ""
        return self.join(limits, ToyExecutor(limits, count_up, network=self.network), name, numerics)

    def turn(self, now_s: float = 0.0) -> None:
        """Let each member decide, execute, and take what comes of it."""
        for member in self.members:
            self.step(member, now_s)
            while member.results:
                self.process(member)

    def step(self, member: Member, now_s: float = 0.0) -> None:
        """Let a member decide, and execute what it decided; the result waits."""
        step = self.schedule(member, now_s)
        if step is not None:
            self.execute(member, step)

    def run(self) -> None:
        """Let all members go on, in turn, until there is nothing left to do."""
        is_busy = True
        while is_busy:
            is_busy = False
            for member in self.members:
                self.step(member)
                is_busy |= bool(member.results)
                while member.results:
                    self.process(member)

    @property
    def tokens(self) -> dict[str, list[int]]:
        """What clients got of each output, by the names of `tests/support/driving.py`."""
        sequences = {(arrival, s.index): s for arrival, group in self.groups.items() for s in group.sequences}
        return {name_of(sequences[name]): output.token_ids for name, output in self.outputs.items()}


def two_planners(*, prefix_caching: bool = False) -> tuple[FleetBench, Member, Member]:
    """Return a fleet of two equal members."""
    limits = small_limits(prefix_caching=prefix_caching)
    bench = FleetBench(limits, limits)
    first, second = bench.members
    return bench, first, second
