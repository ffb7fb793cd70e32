"""Where a request body comes from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a body comes from."""

    num_bytes: int = 0
    """Size of the body."""
    client: str = ""
    """Who sent it, by `client_of`."""
    seed: int | None = None
    """Unsigned 64 bits, from which the seeds of a body that gives none follow; None draws them."""
    is_background: bool = False
    """Its requests wait behind all others, and are not counted in the limits of the queue."""
