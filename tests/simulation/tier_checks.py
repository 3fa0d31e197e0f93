"""The promises on blocks that stay behind: on the host, at other executors, and the output of an encoder.

- A name of a host block stands for the content that it has on a device, at any executor, once no step in flight moves
  something there.
- A name of a block of the encoder stands for the input that is in it, also where an executor has kept it.
- When all is quiet, no transfer is pending anywhere.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from executor_svc.service.servicer import ExecutionServicer
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.engine.engine import Engine
from tests.simulation.transfer_watch import pending_of
from tests.simulation.watching import Watcher
from tests.simulation.worker import SimulatedWorker

if TYPE_CHECKING:
    from tests.simulation.world import World

# Names are looked at in the first step of an attachment, and in one of so many.
STEPS_PER_LOOK = 4


@dataclass(slots=True)
class TierChecks(Watcher):
    """Watches all schedulers of a run.

    Args:
        world: Of the run.
    """

    world: "World"

    def decided(self, process: str, planner: ExecutorPlanner, decision: Decision) -> None:
        """See `Watcher`."""
        if decision.step is None or (decision.step.step_id > 1 and decision.step.step_id % STEPS_PER_LOOK):
            return
        machine = next((it for it in self.world.executors if it.name == planner.name), None)
        servicer = None if machine is None else machine.servicer
        worker = None if machine is None else machine.worker
        if servicer is None or worker is None or not _belongs_to(servicer, worker, planner):
            return
        encoder = planner.blocks.encoder
        encoded = None if encoder is None else encoder.prefix_cache
        for name, block in () if encoded is None else encoded._block_of_hash.items():
            if not worker.has_encoded(block, name):
                self.world.checks.break_promise(f"block {block} of the encoder of {planner.name} has another input")
        moved = {to for sent in planner.in_flight for to in sent.step.blocks_to_swap_out[:, 1].tolist()}
        for pool, of in enumerate(planner.blocks.pools):
            names: PrefixCache | None = of.host.names
            for name, block in () if names is None else names._block_of_hash.items():
                if block + of.host.first_id not in moved and not worker.has_on_host(pool, block, name):
                    self.world.checks.break_promise(
                        f"host block {block} of pool {pool} of {planner.name} has the name of another content"
                    )


def _belongs_to(servicer: ExecutionServicer, worker: SimulatedWorker, planner: ExecutorPlanner) -> bool:
    """Return whether what a planner knows is about this process, as it was attached last."""
    has_instance = planner.info is not None and planner.info.instance_id == worker.info.instance_id
    return has_instance and servicer._attachment.epoch == planner.epoch


def left_of_transfers(world: "World", engine: Engine) -> str:
    """Return which transfers of an engine have not ended, in words; empty: all have."""
    left = [f"{len(engine.fleet.dispatcher.transfers)} in the fleet"] if engine.fleet.dispatcher.transfers else []
    left += [f"{len(planner.transfers)} of {planner.name}" for planner in engine.fleet.planners if planner.transfers]
    for machine in world.executors:
        driver = engine.drivers.get(machine.name)
        if machine.servicer is not None and driver is not None and driver.planner is not None:
            num_pending = len(pending_of(machine.servicer))
            left += [f"{num_pending} at {machine.name}"] if num_pending else []
    return ", ".join(left)
