"""Memory of large messages goes back to the system."""

from processes import run_python

LARGE_AMONG_SMALL = """
from benchmarks.memory import own_bytes
from blendhub.hub.malloc_tuning import return_large_blocks

return_large_blocks()
bytes(30 * 2**20)  # the largest block freed so far
before, small, large = own_bytes(), [], []
for number in range(30):
    large.append(b"x" * (2**21 + number))
    small.append(bytearray(4096))
del large
print(own_bytes() - before)
"""


def test_large_blocks_among_small_ones_are_returned():
    process = run_python(LARGE_AMONG_SMALL)
    assert int(process.communicate(timeout=60)[0]) < 2**22
