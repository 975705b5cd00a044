"""Word indices of the tables that kernels read. Each word is an int64."""

PLANE_WORDS = 10
"""A plane is one layer's keys or values, in the pages and in a shard. Strides and rows are in items."""
ADDRESS, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, SHARD_OFFSET, ROW_ITEMS = range(6)
"""Address of block 0; strides in the pages; byte offset of the first row in a shard; items of a row."""
TABLE, HALF, NEOX, OFFSET = range(6, 10)
"""Address of ``cos_sin``, or 0 without a rotation; its angles for a position; its pairing; its offset in a key."""

COUNT, SLOT, POSITION, SOURCE, ORIGIN, ROW, BLOCKS = range(7)
"""A tile: its tokens; the first token's slot in its block, its position, and the position its key is stored for; the
offset of layer 0 of its shard, and its row there; from ``BLOCKS`` on, the blocks of the tile."""
