"""What an `OSError` of a store is the fault of: the chunk's place, this process, a full file system, or the drive."""

import errno
from enum import Enum, auto


class Fault(Enum):
    """Whose fault an error is."""

    PLACE = auto()
    """Something strange stands at one chunk's place; all others are fine."""
    PROCESS = auto()
    """This process has too many files open or too little memory; the drive and its chunks are fine."""
    FULL = auto()
    """The file system, or a quota on it, is full."""
    ABSENT = auto()
    """A file, or the folder it is in, isn't there."""
    GONE = auto()
    """The device, or what serves it, is away."""
    DRIVE = auto()
    """Anything else: the drive errs."""


_FAULTS = {
    Fault.PLACE: (
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ELOOP,
        errno.EEXIST,
        errno.EACCES,
        errno.EPERM,
        errno.ENAMETOOLONG,
        errno.ENOTEMPTY,
    ),
    Fault.PROCESS: (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
    Fault.FULL: (errno.ENOSPC, errno.EDQUOT),
    Fault.ABSENT: (errno.ENOENT,),
    Fault.GONE: (errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ESHUTDOWN, errno.ENOTCONN, errno.ENOMEDIUM),
}
_FAULT_OF = {number: fault for fault, numbers in _FAULTS.items() for number in numbers}


def fault_of(error: OSError) -> Fault:
    """Whose fault it is."""
    return _FAULT_OF.get(error.errno or 0, Fault.DRIVE)
