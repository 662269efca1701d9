"""What redis-py and the sockets raise, translated into the directory's errors, once."""

from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from directory.errors import DirectoryError, DirectoryFull, DirectoryUnavailable, SchemaMismatch

UNREACHED = (RedisConnectionError, RedisTimeoutError, OSError)
"""Nobody answered (LOADING and refused logins are such errors of redis-py, too). `TimeoutError` is an `OSError`."""

MISPLACED = (ReadOnlyError, MasterDownError, ClusterDownError)
"""Answers of a server that isn't, or isn't yet, the one to ask."""

ONE_OF_A_CLUSTER = "the server is one of a cluster: the URL must begin with redis-cluster://"

TOO_OLD = "the server knows no functions: it must be Redis 7 or Valkey 8, or newer, and no proxy without them"

_TRANSIENT = (*MISPLACED, TryAgainError)
_TRANSIENT_PREFIXES = ("BUSY ", "NOREPLICAS ")
"""Answers of a server that is failing over, or at work on something long: redis-py has no class for these."""


@contextmanager
def map_redis_errors() -> Iterator[None]:
    """Translate what redis-py and the sockets raise."""
    try:
        yield
    except (RedisTimeoutError, TimeoutError) as error:
        raise DirectoryUnavailable(f"no answer from the server: {str(error) or 'timed out'}") from error
    except (RedisConnectionError, OSError) as error:
        raise DirectoryUnavailable(f"the server can't be reached: {error}") from error
    except _TRANSIENT as error:
        raise DirectoryUnavailable(f"the server isn't ready: {error}") from error
    except OutOfMemoryError as error:
        raise DirectoryFull(f"the server is out of memory: {error}") from error
    except (AskError, ClusterCrossSlotError) as error:
        raise DirectoryError(ONE_OF_A_CLUSTER) from error
    except ResponseError as error:
        message = str(error)
        if message.startswith(_TRANSIENT_PREFIXES):
            raise DirectoryUnavailable(f"the server isn't ready: {message}") from error
        if message.startswith("WRONGTYPE"):
            raise SchemaMismatch(f"a key holds something of another schema: {message}") from error
        if message.lower().startswith("unknown command") and "FCALL" in message:
            raise DirectoryError(TOO_OLD) from error
        raise DirectoryError(f"the server refused a call: {message}") from error
    except (RedisError, TypeError, ValueError, AttributeError) as error:
        raise DirectoryError(f"the server answered with something unexpected: {error}") from error
