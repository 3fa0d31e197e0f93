"""How much there is to compute for the waiting groups, by level and tenant. Pure; kept by `waiting_queue.py`."""

from typing import NamedTuple

from scheduler_svc.core.sequence import SequenceGroup


class Work(NamedTuple):
    """The work of some groups.

    Attributes:
        num_prompt_tokens: Tokens of their prompts and encoder inputs, cached ones included.
        num_output_tokens: Output tokens that are expected.
    """

    num_groups: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @classmethod
    def of(cls, group: SequenceGroup) -> "Work":
        """Return the work of a waiting group."""
        return cls(1, group.num_input_tokens, group.num_tokens_to_come)

    def and_(self, other: "Work", sign: int = 1) -> "Work":
        """Return the sum of both, or with `sign` -1 the difference."""
        return Work(
            self.num_groups + sign * other.num_groups,
            self.num_prompt_tokens + sign * other.num_prompt_tokens,
            self.num_output_tokens + sign * other.num_output_tokens,
        )


class WaitingWork:
    """The work of the groups in a queue; `total`: of all of them."""

    def __init__(self) -> None:
        self.total = Work()
        self._of: dict[tuple[int, str], Work] = {}  # by level and tenant

    def add(self, level: int, tenant: str, work: Work) -> None:
        """Add the work of a group."""
        self.total = self.total.and_(work)
        self._of[level, tenant] = self._of.get((level, tenant), Work()).and_(work)

    def remove(self, level: int, tenant: str, work: Work) -> None:
        """Remove the work of a group."""
        self.total = self.total.and_(work, -1)
        left = self._of[level, tenant] = self._of[level, tenant].and_(work, -1)
        if not left.num_groups:
            del self._of[level, tenant]

    def by_tenant(self) -> dict[str, Work]:
        """Return the work of each tenant."""
        works: dict[str, Work] = {}
        for (_, tenant), work in self._of.items():
            works[tenant] = works.get(tenant, Work()).and_(work)
        return works

    def ahead_of(self, level: int, tenant: str) -> Work:
        """Return the work of the groups on earlier levels, and of the tenant's groups on this level."""
        ahead = Work()
        for (number, name), work in self._of.items():
            if number < level or (number == level and name == tenant):
                ahead = ahead.and_(work)
        return ahead
