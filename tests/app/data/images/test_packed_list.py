"""The list of a dataset's images, which forked workers read without copying its memory."""

import os
import sys

import pytest

from relvit.app.data.archives.tar import Member
from relvit.app.data.images.file_datasets import LabelledFiles
from relvit.app.data.images.packed_list import PackedList


def private_memory():
    """Return the memory that this process shares with no other one, in bytes."""
    with open("/proc/self/smaps_rollup") as lines:
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_worker_does_not_copy_the_list_of_images():
    members = [
        (Member("shard.tar", f"n{index % 21841:08d}/{index:08d}.JPEG", index, 9), index) for index in range(50_000)
    ]
    files = LabelledFiles(members, None, 50_000)
    readable, writable = os.pipe()
    if os.fork() == 0:
        before = private_memory()
        for index in range(50_000):
            str(files.samples[index][0])
        os.write(writable, str(private_memory() - before).encode())
        os._exit(0)
    os.wait()
    # With a list the worker copies about 11 MB.
    assert int(os.read(readable, 20)) < 3_000_000


def test_items_are_those_of_the_list_and_shared_objects_are_kept():
    class Table:
        def __reduce__(self):
            raise AssertionError("pickled")

    table = Table()
    items = [("a", 0, table), (("b", "b"), (1, 2), None), ("a", 3, table)]
    packed = PackedList(items, [table])
    assert [*packed] == items
    assert packed[-1] == items[-1]
    assert packed[1:] == items[1:]
    assert packed[0][2] is packed[2][2] is table
    with pytest.raises(IndexError):
        packed[3]
