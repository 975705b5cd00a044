"""A device with streams in plain torch: it copies block by block, and keys stay at their positions."""

from blendhub.devices import Mover, StreamDevice


class CopyingMover(Mover):
    def __init__(self, pages, block_size):
        self._planes = [(layer.keys, layer.values) for layer in pages.layers]
        self._block_size = block_size

    def rows_to_pages(self, memory, table, batch):
        for page, rows in self.parts(memory, batch):
            page.copy_(rows)

    def pages_to_rows(self, memory, table, batch):
        for page, rows in self.parts(memory, batch):
            rows.copy_(page)

    def parts(self, memory, batch):
        """The tokens of each block in pages, and their rows."""
        at, spans = batch.rows.at, batch.spans(self._block_size)
        for planes in self._planes[batch.first_layer : batch.first_layer + batch.n_layers]:
            for plane in planes:
                _, heads, _, width = plane.shape
                end = at + batch.rows.n_rows * heads * width * plane.itemsize
                rows, row = memory[at:end].view(plane.dtype).view(-1, heads, width).transpose(0, 1), batch.rows.first
                for block, slot, count in spans:
                    yield plane[block, :, slot : slot + count], rows[:, row : row + count]
                    row += count
                at = end


class CopyingDevice(StreamDevice):
    name, streams_per_queue, reaches_arena, formats = "torch", 2, True, ("packed_heads",)

    def __init__(self, runtime, staging_mib=0.06):
        super().__init__(staging_mib, 16, lambda place: runtime)

    def _mover(self, pages, layout, block_size):
        return CopyingMover(pages, block_size)
