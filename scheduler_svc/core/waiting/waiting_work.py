"""How much there is to compute for those that wait, by level and tenant. Pure; kept by `waiting_queue.py`."""

from typing import NamedTuple

from scheduler_svc.core.sequence import SequenceGroup


class Work(NamedTuple):
    """What some groups take.

    Attributes:
        num_groups: How many they are.
        num_prompt_tokens: Of their prompts, those in a prefix cache included.
        num_output_tokens: That are expected of them.
    """

    num_groups: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @classmethod
    def of(cls, group: SequenceGroup) -> "Work":
        """Return that of a group which waits."""
        return cls(1, group.num_prompt_tokens, group.num_tokens_to_come)

    def and_(self, other: "Work", sign: int = 1) -> "Work":
        """Return that of both, or with `sign` -1 that of the others."""
        return Work(*(mine + sign * theirs for mine, theirs in zip(self, other, strict=True)))


class WaitingWork:
    """The work of the groups in a queue.

    Attributes:
        total: Of all of them.
    """

    def __init__(self) -> None:
        self.total = Work()
        self._of: dict[tuple[int, str], Work] = {}  # by level and tenant

    def add(self, level: int, tenant: str, work: Work) -> None:
        """A group of a tenant waits on a level."""
        self.total = self.total.and_(work)
        self._of[level, tenant] = self._of.get((level, tenant), Work()).and_(work)

    def remove(self, level: int, tenant: str, work: Work) -> None:
        """It waits no more."""
        self.total = self.total.and_(work, -1)
        left = self._of[level, tenant] = self._of[level, tenant].and_(work, -1)
        if not left.num_groups:
            del self._of[level, tenant]

    def by_tenant(self) -> dict[str, Work]:
        """Return that of each tenant."""
        works: dict[str, Work] = {}
        for (_, tenant), work in self._of.items():
            works[tenant] = works.get(tenant, Work()).and_(work)
        return works

    def ahead_of(self, level: int, tenant: str) -> Work:
        """Return that of the groups on earlier levels, and of the tenant's on this level."""
        ahead = Work()
        for (number, name), work in self._of.items():
            if number < level or (number == level and name == tenant):
                ahead = ahead.and_(work)
        return ahead
