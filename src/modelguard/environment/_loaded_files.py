"""The files that the dynamic linker has loaded into this process, and the one that a function comes from.

Only the standard library is used, because a process that is looked at may have no modelguard.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


class _LinkMap(ctypes.Structure):
    """``struct link_map`` of link.h, an entry in the linker's list of files; its beginning, which debuggers read."""

    _fields_ = (
        ("address", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("previous", ctypes.c_void_p),
    )


#: Where the section is in ``Elf64_Sym`` and ``Elf32_Sym`` of elf.h.
_SECTION = 6 if sys.maxsize > 2**32 else 14
_UNDEFINED = 0  # SHN_UNDEF
_RTLD_DL_SYMENT = 1  # dladdr1 gives the symbol of the address
_RTLD_DI_LINKMAP = 2  # of dlfcn.h
_RTLD_DI_TLS_DATA = 10


def listed() -> Iterator[tuple[str, int, int | None]]:
    """The files in the order of loading: name, where its addresses begin, and where the calling thread's variables do.

    ``dl_iterate_phdr`` would call back into Python under the linker's lock. The callback may lose the GIL to a thread
    that waits for that lock, in a dlopen or in the same call, and then both wait for ever. So this reads the linker's
    list, as debuggers do, without a lock. A file that another thread closes meanwhile could be read after it is gone;
    preloaded libraries, and those that Python has imported, are never closed.
    """
    program, entry = ctypes.CDLL(None), ctypes.c_void_p()
    handle = ctypes.c_void_p(program._handle)  # noqa: SLF001 - ctypes documents it
    if program.dlinfo(handle, _RTLD_DI_LINKMAP, ctypes.byref(entry)) != 0:
        return
    while entry.value:
        loaded = _LinkMap.from_address(entry.value)
        data = ctypes.c_void_p()
        # glibc's handles are the entries themselves. musl does not know this request, and refuses it.
        known = program.dlinfo(entry, _RTLD_DI_TLS_DATA, ctypes.byref(data)) == 0
        yield os.fsdecode(loaded.name or b""), loaded.address, data.value if known else None
        entry = ctypes.c_void_p(loaded.next)


def file_of(function: str) -> tuple[int | None, str]:
    """The file that defines a function of the whole program: where it begins in memory, and its name."""
    program = ctypes.CDLL(None)  # searched in the order in which calls are bound
    address = ctypes.cast(program[function], ctypes.c_void_p)
    if _is_jump(program, address):
        for path, *_ in listed():
            if (found := _defined_in(path, function)) is not None:
                return found
    return _file_at(address)


def _file_at(address: ctypes.c_void_p) -> tuple[int | None, str]:
    info = _DlInfo()
    ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    return info.dli_fbase, os.fsdecode(info.dli_fname or b"")


def _is_jump(program: ctypes.CDLL, address: ctypes.c_void_p) -> bool:
    """Whether a file has only an entry of its jump table at an address, and not the function itself.

    In a program that is not position-independent, as Debian's and Ubuntu's ``/usr/bin/python3`` is, such an entry
    is the address of a library's function for all files: the linker makes it so if the program uses the address,
    and Python puts that of ``malloc`` into a table. The program's symbol is undefined and has a value all the same
    (System V ABI, AMD64 supplement, "Function Addresses").
    """
    if not hasattr(program, "dladdr1"):  # musl
        return False
    info, symbol = _DlInfo(), ctypes.c_void_p()
    found = program.dladdr1(address, ctypes.byref(info), ctypes.byref(symbol), _RTLD_DL_SYMENT)
    if not found or symbol.value is None:
        return False
    return ctypes.c_uint16.from_address(symbol.value + _SECTION).value == _UNDEFINED


def _defined_in(path: str, function: str) -> tuple[int | None, str] | None:
    """Where a loaded library begins in memory, and its name; None if it does not define the function itself."""
    if not path:  # the program
        return None
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
        # The search goes on in the libraries that it needs. Of these, the first in the order of loading counts.
        found = _file_at(ctypes.cast(library[function], ctypes.c_void_p))
    except (OSError, AttributeError):
        return None
    return found if found[1] == path else None
