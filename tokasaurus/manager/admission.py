"""Which waiting sequences may start."""

from collections.abc import Iterable

from tokasaurus.manager.sequence import Sequence


def choose_admissions(waiting: Iterable[Sequence], num_free_slots: int, num_free_blocks: int) -> list[Sequence]:
    """The longest head of `waiting` whose worst cases fit together, a slot for each.

    First come first served: one that does not fit holds back all behind it, or a long prompt would never get in.
    num_free_blocks: blocks of the pool that no admitted sequence may come to need.
    """
    chosen: list[Sequence] = []
    for sequence in waiting:
        if len(chosen) == num_free_slots or sequence.max_blocks > num_free_blocks:
            break
        num_free_blocks -= sequence.max_blocks
        chosen.append(sequence)
    return chosen
