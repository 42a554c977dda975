"""A Trainer as Flower's ClientApp."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import attrs

from ortflex_core import (
    Batches,
    Columns,
    ConfigError,
    DataError,
    DataSource,
    OrtflexError,
    Pieces,
    Trainer,
    internals_of,
    split,
)
from ortflex_plugins.flower import client_state, shared
from ortflex_plugins.flower.shared import require_flower

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

MakeTrainer = Callable[..., tuple[Any, ...]]
_ROWS = "num-examples"
_EXPECTED = (
    "make_trainer: expected a function of Flower's context that returns (trainer, data) or "
    "(trainer, data, validation_data)"
)


@attrs.frozen
class Client:
    """The result of ``make_trainer``, checked: a new Trainer, and the arguments of ``fit``."""

    trainer: Trainer
    data: tuple[Any, ...]
    validation: tuple[Any, ...] | None

    @classmethod
    def of(cls, given: Any) -> Client:
        """Check the result of ``make_trainer``; a fraction of validation rows is held out here.

        Raises:
            ConfigError: the result is not a new Trainer and data.
            DataError: there are no data.
        """
        if not isinstance(given, tuple) or len(given) not in (2, 3):
            raise ConfigError(f"{_EXPECTED}, got {type(given).__name__}")
        trainer, data = given[:2]
        if not isinstance(trainer, Trainer):
            raise ConfigError(f"{_EXPECTED}; its first value is a {type(trainer).__name__}")
        _check_new(trainer)
        _check_rows(data)
        rows = _arguments(data)
        validation = given[2] if len(given) == 3 else None
        if validation is None:
            return cls(trainer, rows, None)
        if isinstance(validation, float):
            columns = internals_of(trainer).setup.open(*rows, *[None] * (3 - len(rows)))
            train, held = split(columns, validation, trainer.seed)
            return cls(trainer, (train,), (held,))
        _check_rows(validation)
        return cls(trainer, rows, _arguments(validation))

    def fit(self) -> dict[str, float]:
        """Train; returns the last line of the History, without times and counters."""
        validation = self.validation
        if validation is not None and len(validation) == 1:
            [validation] = validation
        history = self.trainer.fit(*self.data, validation_data=validation)
        now = internals_of(self.trainer).live.standing.manual
        rows = now.rows_per_epoch
        if rows is None:  # an iterable whose length is known when it has ended
            rows = now.rows // max(now.epoch, 1)
        columns = [c for c in history.columns if c == "loss" or c.startswith("validation_")]
        values = {column: float(history[column][-1]) for column in columns} if len(history) else {}
        return {**values, _ROWS: rows}

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics on the validation data; without them, on the data."""
        rows = self.data if self.validation is None else self.validation
        count = _count(self.trainer, rows)
        scores = self.trainer.evaluate(*rows)
        return {**{n: float(v) for n, v in scores.items()}, _ROWS: count}


def client_app(
    make_trainer: MakeTrainer,
    *,
    share: shared.Share = "parameters",
    keep: Literal["slots", "nothing"] = "slots",
) -> ClientApp:
    """A ClientApp that trains and evaluates an ONNX model.

    A round of training is one call to :meth:`Trainer.fit <ortflex_core.Trainer.fit>`: ``epochs`` of
    the Trainer counts the epochs of a round, and its schedule starts again in each round. Messages
    have the shared tensors, the loss and the number of rows, by which strategies weight a client.

    Args:
        make_trainer: a function of Flower's ``context`` (and, with a second parameter, of the
            configuration that came with the message: a mapping with ``server-round`` and what
            ``server_app(config=…)`` sends). It returns ``(trainer, data)`` or ``(trainer, data,
            validation_data)``: a new Trainer, and what its ``fit`` takes: ``(X, y)``, ``(X, y,
            sample_weight)`` or a data source; validation data may be a fraction of the rows, too.
            Without validation data, clients evaluate on their data.
        share: what travels: ``"parameters"``, every trained tensor and the running statistics of
            BatchNormalization; ``"adapters"``; or names, globs and ``"!glob"`` as in ``params``.
            The rest is private.
        keep: what a client keeps in ``context.state`` until its next round. ``"slots"``: the state
            of its optimizer and its private tensors, so that its rounds are bit-identical to calls
            of ``fit`` one after another. ``"nothing"``: every round starts with a new optimizer, and
            with the private tensors of the file.

    Returns:
        Flower's ClientApp, with functions for ``train`` and ``evaluate``.

    Raises:
        ConfigError: Flower is not installed, or an argument has another value. During a round the
            app raises an OrtflexError that names the client; Flower sends it to the server.

    >>> def make_trainer(context):
    ...     X, y = partition_rows(load("data.npz"), context)
    ...     return Trainer("model.onnx", loss="squared_error", epochs=1), (X, y)
    >>> app = client_app(make_trainer)  # doctest: +SKIP

    Source: B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
    Data" (2017); Flower's Message API.
    """
    if not callable(make_trainer):
        raise ConfigError(f"{_EXPECTED}, got {type(make_trainer).__name__}")
    if keep not in ("slots", "nothing"):
        raise ConfigError(f"keep: expected 'slots' or 'nothing', got {keep!r}")
    flwr_app = require_flower()
    app = require_flower("flwr.clientapp").ClientApp()

    @app.train()  # type: ignore[untyped-decorator,unused-ignore]
    def train(message: Message, context: Context) -> Message:
        with _naming(context):
            client, key = _prepare(make_trainer, message, context, share, slots=True)
            metrics = client.fit()
            if keep == "slots":
                client_state.keep(client.trainer, context, share)
            content = {
                key: shared.pack_shared(client.trainer, share),
                "metrics": flwr_app.MetricRecord(metrics),
            }
        return flwr_app.Message(flwr_app.RecordDict(content), reply_to=message)

    @app.evaluate()  # type: ignore[untyped-decorator,unused-ignore]
    def evaluate(message: Message, context: Context) -> Message:
        with _naming(context):
            client, _ = _prepare(make_trainer, message, context, share, slots=False)
            content = {"metrics": flwr_app.MetricRecord(client.evaluate())}
        return flwr_app.Message(flwr_app.RecordDict(content), reply_to=message)

    return app


def _prepare(
    make_trainer: MakeTrainer,
    message: Message,
    context: Context,
    share: shared.Share,
    *,
    slots: bool,
) -> tuple[Client, str]:
    """The client with the weights of a message, and the key of the weights in the message."""
    records = message.content.array_records
    if len(records) != 1:
        raise DataError(
            f"the message of the server has {len(records)} records of arrays "
            f"({', '.join(records) or 'none'}), expected the one that server_app sends"
        )
    [(key, arrays)] = records.items()
    config = {k: v for record in message.content.config_records.values() for k, v in record.items()}
    given = {k: v for k, v in config.items() if k not in shared.DESCRIPTION}
    client = Client.of(_call(make_trainer, context, given))
    shared.check_description(client.trainer, config)
    client_state.restore(client.trainer, context, slots=slots)
    shared.load_shared(client.trainer, arrays, share)
    return client, key


def _call(make_trainer: MakeTrainer, context: Context, config: Mapping[str, Any]) -> Any:
    try:
        inspect.signature(make_trainer).bind(context, config)
    except (TypeError, ValueError):
        return make_trainer(context)
    return make_trainer(context, config)


def _check_new(trainer: Trainer) -> None:
    """Refuse a Trainer that has trained, and settings that have no meaning here."""
    inner = internals_of(trainer)
    if inner.live.standing.fits or inner.live.standing.slots or trainer.backend_ is not None:
        raise ConfigError(
            "make_trainer returned a Trainer that has already trained; create a new one in every "
            "call: the weights come with the message, and the client's own state is in "
            "context.state"
        )
    if inner.arguments.get("averaging") is not None:
        raise ConfigError(
            "averaging: the averages of a client are neither shared nor exported; leave it out, because "
            "the strategy averages"
        )
    if inner.arguments.get("distributed") is not None:
        raise ConfigError("distributed: a client trains in one process; leave it out")


def _check_rows(data: Any) -> None:
    first = data[0] if isinstance(data, tuple) and data else data
    if isinstance(first, Mapping):
        first = next(iter(first.values()), None)
    empty = first is None or isinstance(first, tuple)
    if not empty and hasattr(first, "__len__") and not isinstance(first, Columns | Batches):
        empty = len(first) == 0
    if empty:
        raise DataError(
            "it has no data: make_trainer returned no rows to train or evaluate on. Exclude "
            "nodes without data from the federation"
        )


def _arguments(data: Any) -> tuple[Any, ...]:
    """The arguments of ``fit`` and ``evaluate``, from ``(X, y)`` or a source."""
    return data if isinstance(data, tuple) and len(data) in (2, 3) else (data,)


def _count(trainer: Trainer, rows: tuple[Any, ...]) -> int:
    X = rows[0].load() if isinstance(rows[0], DataSource) else rows[0]
    if isinstance(X, Pieces):
        return sum(X.sizes)
    known = isinstance(X, Columns | Mapping) or hasattr(X, "__array__")
    if isinstance(X, Batches) or (len(rows) == 1 and not known):
        raise DataError(
            "the number of rows of an iterable of batches is not known, and strategies weight a client "
            "by it; give validation data as (X, y) or a data source"
        )
    return internals_of(trainer).setup.open(X, *rows[1:], *[None] * (3 - len(rows))).rows


@contextmanager
def _naming(context: Context) -> Iterator[None]:
    """Name the client in errors: Flower sends only their message to the server."""
    try:
        yield
    except OrtflexError as error:
        config = context.node_config
        name = f"the client of node {context.node_id}"
        if "partition-id" in config:
            name += f" (partition {config['partition-id']} of {config.get('num-partitions', '?')})"
        raise OrtflexError(f"{name}: {error}") from error
