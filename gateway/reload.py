"""A configuration read again while the gateway runs: all of it is checked before any of it is applied.

What can't be changed in a running process is said and left as it is; so is everything where the new one is wrong.
"""

import logging
from collections.abc import Callable, Mapping

from gateway.config import GatewayConfig

logger = logging.getLogger(__name__)

Apply = Callable[[GatewayConfig], None]


class Rejected(Exception):
    """What was read can't be used; the message says why."""


class Reload:
    """Keeps the configuration in force. `applied` names the sections that can change, each with how to apply it.

    `reread()` gives the new one or raises `Rejected`; `count(result)` hears how each attempt went: `ok`, `rejected`.
    """

    def __init__(
        self,
        config: GatewayConfig,
        reread: Callable[[], GatewayConfig],
        applied: Mapping[str, Apply],
        count: Callable[[str], None],
    ) -> None:
        self.config = config
        self._reread, self._applied, self._count = reread, applied, count

    def run(self) -> None:
        """Read, check and apply now."""
        try:
            new = self._reread()
        except Rejected as error:
            logger.error("the configuration isn't reloaded, the old one stays in force: %s", error)
            self._count("rejected")
            return
        names = type(new).model_fields
        changed = [name for name in names if getattr(new, name) != getattr(self.config, name)]
        live = [name for name in changed if name in self._applied]
        left = [name for name in changed if name not in self._applied]
        self.config = self.config.model_copy(update={name: getattr(new, name) for name in live})
        for apply in dict.fromkeys(self._applied[name] for name in live):
            apply(self.config)
        logger.info("the configuration is reloaded: %s", ", ".join(live) if live else "nothing that applies changed")
        if left:
            logger.warning("changes of %s apply after a restart only", ", ".join(left))
        self._count("ok")
