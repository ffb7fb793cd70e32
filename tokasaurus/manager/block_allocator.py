"""Which KV blocks are free. Block 0 is padding and never given."""


class BlockAllocator:
    """Ids 1..num_blocks, the most recently freed first: its memory is the likeliest to be in a cache still."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._is_used = bytearray(num_blocks + 1)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """`num_blocks` free blocks, now used. Whoever takes has made sure that they are there."""
        assert num_blocks <= len(self._free), f"{num_blocks} blocks asked, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._is_used[block] = 1
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Each of `blocks` is free again at once: the device executes in order, so a step that was sent before this
        cannot touch what a later step writes there."""
        for block in blocks:
            assert self._is_used[block], f"block {block} freed twice"
            self._is_used[block] = 0
        self._free.extend(reversed(blocks))
