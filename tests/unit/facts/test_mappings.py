"""What ``maps`` and ``smaps`` say about the memory of a process."""

from __future__ import annotations

from modelguard.facts._proc import mapped_files, parse_mappings

KB = 1024

MAPS = """\
400000-401000 r--p 00000000 08:02 11    /usr/bin/my python
7f0000-7f1000 r--p 00000000 08:02 12    /usr/lib/libc.so.6
7f1000-7f2000 r-xp 00001000 08:02 12    /usr/lib/libc.so.6
7f2000-7f3000 rw-p 00000000 00:00 0
7f3000-7f4000 r-xp 00000000 08:02 13    /usr/lib/libold.so (deleted)
7ff000-800000 rw-p 00000000 00:00 0     [stack]
"""

SMAPS = """\
7f0000-7f1000 rw-p 00000000 00:00 0
Rss:                 10 kB
Private_Clean:        3 kB
Private_Dirty:        4 kB
VmFlags: rd wr nh
7f1000-7f2000 r--p 00000000 08:02 12    /usr/lib/Rss: 9 kB
Rss:                  5 kB
"""


def test_mappings_of_maps() -> None:
    """Names may have blanks, and a file that was removed since is marked and keeps its name."""
    found = parse_mappings(MAPS)
    assert (0x400000, 0x401000, "r--p", True, "/usr/bin/my python", False) == (
        found[0].start,
        found[0].end,
        found[0].access,
        found[0].is_file,
        found[0].name,
        found[0].deleted,
    )
    assert ("", False) == (found[3].name, found[3].is_file)
    assert ("/usr/lib/libold.so", True) == (found[4].name, found[4].deleted)
    assert ("[stack]", False) == (found[5].name, found[5].is_file)


def test_mapped_files_begin_at_their_first_mapping() -> None:
    """Each file is listed once; memory without a file is not."""
    expected = {"/usr/bin/my python": 0x400000, "/usr/lib/libc.so.6": 0x7F0000, "/usr/lib/libold.so": 0x7F3000}
    assert expected == mapped_files(parse_mappings(MAPS))


def test_mappings_of_smaps_have_sizes_and_flags() -> None:
    """Sizes come in bytes, and a name that looks like a figure is not one."""
    first, second = parse_mappings(SMAPS)
    assert ({"Rss": 10 * KB, "Private_Clean": 3 * KB, "Private_Dirty": 4 * KB}, 7 * KB) == (first.sizes, first.private)
    assert frozenset({"rd", "wr", "nh"}) == first.flags
    assert ({"Rss": 5 * KB}, 0) == (second.sizes, second.private)
