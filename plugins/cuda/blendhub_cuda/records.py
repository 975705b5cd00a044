"""The words of the tables that kernels read, each an int64."""

PLANE_WORDS = 10
"""A plane is one layer's keys or values, in the pages and in a shard. Strides and rows are in items."""
ADDRESS, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, PART, ROW_ITEMS = range(6)
"""Where block 0 lies; strides in the pages; where the rows begin in a shard, in bytes; how long they are there."""
TABLE, HALF, NEOX, OFFSET = range(6, 10)
"""Where ``cos_sin`` lies, or 0 for what does not turn; its angles a row; its pairing; where it begins in a key."""

COUNT, SLOT, POSITION, SOURCE, ORIGIN, ROW, BLOCKS = range(7)
"""A tile: how many tokens; the first one's slot in its block, its position, the position that its key is turned for;
where its shard would begin, and its row there; and from ``BLOCKS`` on the blocks that the tile lies in."""
