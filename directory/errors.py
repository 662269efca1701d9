"""What can go wrong with the directory.

DirectoryError
├─ DirectoryUnavailable   it can't be reached, or didn't answer in time; nothing is known about a write's fate
│  └─ PartitionUnavailable   only some of its servers were asked, and none of these answered; the others may
├─ FunctionsMissing       a server lacks the directory's functions, and they mustn't be loaded from here
├─ DirectoryFull          the server is at `maxmemory`: a placement was refused, the server is otherwise well
├─ RegistrationRefused    the incarnation exists already; draw another
├─ IdentityRefused        an identity, scope or key scheme that could make two different things share a key
└─ SchemaMismatch         the server holds a layout of another version; nothing is guessed
"""


class DirectoryError(Exception):
    """Base of everything the directory raises."""


class DirectoryUnavailable(DirectoryError):
    """The server can't be reached or didn't answer in time; a write may or may not have happened."""


class PartitionUnavailable(DirectoryUnavailable):
    """A lookup's partitions are all on servers of a cluster that didn't answer; it says nothing about the others."""


class FunctionsMissing(DirectoryError):
    """A server lacks the directory's functions, and this user, or this command, may not load them."""


class DirectoryFull(DirectoryError):
    """The server refused a placement for want of memory; withdrawals still work."""


class RegistrationRefused(DirectoryError):
    """The incarnation is taken; the writer must draw a new one."""


class IdentityRefused(DirectoryError, ValueError):
    """An identity, a scope or a scheme that is not safe to build keys from; the message names the field."""


class SchemaMismatch(DirectoryError):
    """The server speaks another version of the schema."""
