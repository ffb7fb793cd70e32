"""Commands for the managers, each waited for until it is done or its replica is lost."""

import asyncio
from collections.abc import Callable
from itertools import count

from tokasaurus.messages.commands import CommandDone, EngineCommand
from tokasaurus.server.engine_client.replicas import Replica


class ReplicaLost(Exception):
    """The replica died before it answered: whether the command was carried out is not known."""


class CommandRefused(Exception):
    """Nothing was changed. The message is the reason, in one line."""


class Commands:
    """Commands to replicas and their results. Used by the event loop only."""

    def __init__(self, replicas: list[Replica]) -> None:
        """replicas: all of them; a new object takes the place of each that is lost."""
        self._replicas = replicas
        self._ids = count(1)
        self._waiting: dict[int, tuple[Replica, asyncio.Future[None]]] = {}
        """Commands without a result, by id."""

    @property
    def up(self) -> list[Replica]:
        """The replicas that are ready."""
        return [replica for replica in self._replicas if replica.is_ready]

    async def run_on_all(self, make: Callable[[int], EngineCommand]) -> None:
        """Raises CommandRefused. A replica that dies meanwhile is told at its next start what still holds; one that is
        up again meanwhile is told too."""
        told: list[Replica] = []
        while untold := [replica for replica in self.up if replica not in told]:
            told += untold
            answers = await asyncio.gather(*(self.run(replica, make) for replica in untold), return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, ReplicaLost):
                    raise answer

    async def run(self, replica: Replica, make: Callable[[int], EngineCommand]) -> None:
        """Returns when the replica has carried it out. make: from a command id. Raises ReplicaLost, CommandRefused."""
        if replica.connection is None:  # it died before: `lose` will not be called again
            raise ReplicaLost("the engine died")
        command_id = next(self._ids)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[command_id] = replica, done
        try:
            replica.send(make(command_id))
            await done
        finally:
            del self._waiting[command_id]

    def note(self, message: CommandDone) -> None:
        """A manager has answered."""
        _, done = self._waiting.get(message.command_id, (None, None))
        if done is not None and not done.done():
            if message.error:
                done.set_exception(CommandRefused(message.error))
            else:
                done.set_result(None)

    def lose(self, replica: Replica) -> None:
        """It has died."""
        for one, done in self._waiting.values():
            if one is replica and not done.done():
                done.set_exception(ReplicaLost("the engine died"))
