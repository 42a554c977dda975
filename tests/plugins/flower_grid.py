"""Flower without a network: a Grid that calls the ClientApp of every node in this process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.message_pb2 import Message as Written
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


def as_bytes(message: Message) -> bytes:
    """A message as Flower sends it."""
    from flwr.common.serde import message_to_proto

    written: Written = message_to_proto(message)
    out: bytes = written.SerializeToString()
    return out


class LocalGrid(Grid):
    """Nodes 1 to n, each with a context of its own; replies come in the order of the nodes."""

    def __init__(self, app: Any, nodes: int, **config: Any) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.run_config = app, config
        self.contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": node - 1, "num-partitions": nodes},
                state=RecordDict(),
                run_config=config,
            )
            for node in range(1, nodes + 1)
        }
        self.sent: list[Message] = []
        self.replies: list[Message] = []

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        out = []
        for message in sorted(messages, key=lambda m: m.metadata.dst_node_id):
            self.sent.append(message)
            out.append(self.answer(message))
        self.replies += out
        return out

    def answer(self, message: Message) -> Message:
        """What a node replies; an exception is an error, as in Flower."""
        try:
            reply: Message = self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            return Message(Error(code=0, reason=f"{type(error)}:<'{error}'>"), reply_to=message)
        return reply

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    run = property(lambda self: None)
    create_message = get_nodes = push_messages = pull_messages = set_run  # type: ignore[assignment]
