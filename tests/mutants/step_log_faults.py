"""Faults in the step log and its replay: a call that is not recorded, a snapshot that lacks something."""

from tests.mutants.fault import Fault

LOG = "scheduler_svc/step_log"
UNIT = "tests/unit/scheduler_svc"
REPLAYS = ("tests/property/test_step_log.py::test_a_recorded_fleet_decides_every_step_again",)
NAMES = (f"{UNIT}/step_log/test_block_names.py",)

FAULTS = (
    Fault(
        "an output that a stop string ends is not recorded",
        f"{LOG}/recording_fleet.py",
        "        self._recorded(super().finish, (core, sequence), encoding.sequence_finished, *arguments)\n",
        "        super().finish(core, sequence)\n",
        REPLAYS,
    ),
    Fault(
        "a decision is recorded as if no executor were expected",
        f"{LOG}/recording_fleet.py",
        "self._note(encoding.step_decided, number, now_s, is_complete, decision.step, failed)",
        "self._note(encoding.step_decided, number, now_s, True, decision.step, failed)",
        (f"{UNIT}/step_log/test_recording_fleet.py",),
    ),
    Fault(
        "a snapshot forgets groups of an executor that was just lost",
        f"{LOG}/recording_fleet.py",
        "tuple(self._number_of[core] for core in self.cores), self._outside)",
        "tuple(self._number_of[core] for core in self.cores), {})",
        (f"{UNIT}/step_log/test_recording_fleet.py",),
    ),
    Fault(
        "a snapshot turns the order of eviction around",
        f"{LOG}/state_fields.py",
        "lambda order: [order.block_ids]",
        "lambda order: [order.block_ids[::-1]]",
        REPLAYS,
    ),
    Fault(
        "digests of blocks are of tokens that the log does not have",
        f"{LOG}/block_names.py",
        "                content = mask.ids(np.frombuffer(content, TOKEN)).astype(TOKEN, copy=False).tobytes()\n",
        "                pass\n",
        (f"{UNIT}/step_log/test_recording_fleet.py",),
    ),
    Fault(
        "a file leaves out names that stand in the one before",
        f"{LOG}/block_names.py",
        '        """A file begins: what is in others is not known there."""\n        self._written.clear()\n',
        '        """A file begins: what is in others is not known there."""\n',
        NAMES,
    ),
    Fault(
        "a snapshot has the names of the fleet",
        f"{LOG}/writer.py",
        "encode.snapshot.names = self._names.others(encode.snapshot.names)",
        "pass",
        NAMES,
    ),
    Fault(
        "steps in a log have the names of the fleet",
        f"{LOG}/block_names.py",
        "for blocks in (record.blocks_kept, record.step_decided.step.registered_blocks):",
        "for blocks in (record.blocks_kept,):",
        NAMES,
    ),
    Fault(
        "kept blocks in a log have the names of the fleet",
        f"{LOG}/block_names.py",
        "for blocks in (record.blocks_kept, record.step_decided.step.registered_blocks):",
        "for blocks in (record.step_decided.step.registered_blocks,):",
        NAMES,
    ),
    Fault(
        "blocks that a look has named are forgotten",
        f"{LOG}/recording_fleet.py",
        "        try:\n            returned = call(*arguments)\n",
        "        self._named.clear()\n        try:\n            returned = call(*arguments)\n",
        NAMES,
    ),
    Fault(
        "the checksum of a record is not looked at",
        f"{LOG}/log_files.py",
        "            if zlib.crc32(content) != checksum:",
        "            if False:",
        (f"{UNIT}/replay/test_bad_logs.py",),
    ),
    Fault(
        "an object of any class stands for another one",
        f"{LOG}/state_codec.py",
        '        if type(value) is not kind:\n            raise SnapshotError(f"object',
        '        if False:\n            raise SnapshotError(f"object',
        (f"{UNIT}/replay/test_hostile_logs.py",),
    ),
    Fault(
        "bytes of a snapshot may be taken again and again",
        f"{LOG}/state_codec.py",
        "content, self._bytes = bytes(self._bytes[:length]), self._bytes[length:]",
        "content = bytes(self._bytes[:length])",
        (f"{UNIT}/replay/test_hostile_logs.py",),
    ),
    Fault(
        "a cached prefix of a snapshot is not computed before it is found",
        "scheduler_svc/replay/player.py",
        "        if not found & self._unfilled:\n            return\n",
        "        return\n",
        ("tests/contract/test_step_log.py::test_live_sequences_of_a_snapshot_are_computed_first",),
    ),
    Fault(
        "decided steps are not compared",
        "scheduler_svc/replay/core_replay.py",
        "        if _content(decided) != _content(recorded):",
        "        if False:",
        (f"{UNIT}/replay/test_bad_logs.py",),
    ),
)
