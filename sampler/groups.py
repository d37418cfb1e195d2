"""Groups: responses of one prompt whose rewards are compared with each other, and so trained on together."""

from __future__ import annotations

from dataclasses import dataclass, field

from sampler.records import OpenSample


@dataclass(slots=True)
class Group:
    """A group of several responses, some of which are in flight."""

    tasks: dict[str, int] = field(default_factory=dict)  # those in flight, with their version at dispatch
    samples: list[OpenSample] = field(default_factory=list)  # those that have arrived
    oldest: int | None = None  # as the group was last counted; kept by its owner

    def __len__(self) -> int:
        return len(self.tasks) + len(self.samples)

    def oldest_version(self) -> int | None:
        """Version of its oldest token, as far as it is known; tasks in flight may bring none older than their dispatch.

        None where the group has no members.
        """
        oldest = min(self.tasks.values(), default=None)
        for sample in self.samples:
            if oldest is None or sample.oldest_version < oldest:
                oldest = sample.oldest_version
        return oldest


def is_degenerate(group: list[OpenSample]) -> bool:
    """Whether all rewards of a group are equal, so that it says nothing about the policy."""
    return all(sample.reward == group[0].reward for sample in group)
