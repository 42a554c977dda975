"""A model and a strategy as Flower's ServerApp."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx

from ortflex_core import (
    Array,
    ConfigError,
    DataError,
    ModelError,
    OrtflexError,
    Trainer,
    expected_count,
    is_count,
    short_repr,
)
from ortflex_plugins.flower import shared
from ortflex_plugins.flower.shared import require_flower

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import Strategy

_log = logging.getLogger("ortflex")
_ROUNDS = 3
_MOST_ROWS = 2**53


def server_app(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | Trainer,
    *,
    strategy: Strategy | None = None,
    share: shared.Share = "parameters",
    rounds: int | None = None,
    config: Mapping[str, Any] | None = None,
    validation_data: Any = None,
    output: str | os.PathLike[str] | None = None,
) -> ServerApp:
    """A ServerApp that runs a strategy on the shared tensors of a model and writes the trained model.

    Args:
        model: the model that the clients train, as for :class:`~ortflex_core.Trainer`; its weights
            are the first ones. A Trainer is needed where clients use ``head``, ``edits``, ``params``,
            ``adapters`` or a loss on another tensor than the only float output: one with the same
            arguments.
        strategy: one of ``flwr.serverapp.strategy``; None (the default): ``FedAvg()``.
        share: as for :func:`client_app`.
        rounds: None (the default): ``num-server-rounds`` of the run's configuration, else 3.
        config: numbers and strings that are sent to the clients with every message, for
            ``make_trainer(context, config)``.
        validation_data: ``(X, y)``, ``(X, y, sample_weight)`` or a data source on which the server
            evaluates the weights before the first and after every round; it needs a Trainer as
            ``model``.
        output: where the model with the final weights is written; None (the default): ``output`` of
            the run's configuration, else ``trained.onnx`` in the current folder.

    Returns:
        Flower's ServerApp.

    Raises:
        ConfigError: Flower is not installed, or an argument has another value. During the run the
            app raises a DataError if the strategy returns other names or shapes, and an
            OrtflexError if every client of a round failed. A reply with other names, shapes or metrics,
            values that are not finite, or a wrong number of rows is left out, with a warning.

    >>> app = server_app("model.onnx", rounds=5, output="trained.onnx")  # doctest: +SKIP

    Source: Flower's Message API, ``Strategy.start``.
    """
    if validation_data is not None and not isinstance(model, Trainer):
        raise ConfigError(
            "validation_data: the loss is not known; pass a Trainer as model: "
            'server_app(Trainer("model.onnx", loss=…), validation_data=…)'
        )
    if rounds is not None and (not is_count(rounds)):
        raise ConfigError(f"rounds: {expected_count(rounds)}")
    flwr_app = require_flower()
    app = require_flower("flwr.serverapp").ServerApp()
    chosen = strategy
    if chosen is None:
        chosen = require_flower("flwr.serverapp.strategy").FedAvg()

    @app.main()  # type: ignore[untyped-decorator,unused-ignore]
    def main(grid: Grid, context: Context) -> None:
        trainer = _trainer(model)
        first = shared.pack_shared(trainer, share)
        # Clients may know more about the classes of a file than the file does.
        known = shared.description(trainer) if isinstance(model, Trainer) else {}
        sent = {**(config or {}), **known}
        result = _checked(chosen, shared.as_arrays(first)).start(
            grid,
            first,
            num_rounds=rounds or int(context.run_config.get("num-server-rounds", _ROUNDS)),
            train_config=flwr_app.ConfigRecord(dict(sent)),
            evaluate_config=flwr_app.ConfigRecord(dict(sent)),
            evaluate_fn=None
            if validation_data is None
            else _evaluation(trainer, share, validation_data),
        )
        if not result.arrays:
            raise OrtflexError(
                "the strategy returned no weights in any round, so nothing is written"
            )
        shared.load_shared(trainer, result.arrays, share)
        path = os.fspath(output or context.run_config.get("output", "trained.onnx"))
        trainer.export(path)
        _log.info("wrote %s", os.path.abspath(path))

    return app


def _trainer(model: Any) -> Trainer:
    if isinstance(model, Trainer):
        return model
    try:
        # Only which tensors are trained is needed, and that depends on the tensor that the loss reads.
        return Trainer(model, loss="squared_error", progress=False)
    except (ConfigError, ModelError) as error:
        raise ConfigError(
            f"server_app: {error}. If the clients' Trainer works, pass a Trainer with the same "
            "arguments to the server instead of the model"
        ) from error


def _checked(strategy: Any, expected: Mapping[str, Array]) -> Any:
    """A copy of a strategy whose replies and results are checked."""
    checked = copy.copy(strategy)
    aggregate = checked.aggregate_train  # the method of the copy, which has the state of its round
    evaluate = checked.aggregate_evaluate
    weight = getattr(strategy, "weighted_by_key", None)

    def aggregate_evaluate(server_round: int, replies: Any) -> Any:
        return evaluate(server_round, _fitting(server_round, list(replies), None, weight))

    def aggregate_train(server_round: int, replies: Any) -> Any:
        replies = _fitting(server_round, list(replies), expected, weight)
        errors = [reply.error.reason for reply in replies if reply.has_error()]
        if errors and len(errors) == len(replies):
            raise OrtflexError(
                f"every client failed in round {server_round}; the first error: {errors[0]}"
            )
        if not replies:
            raise OrtflexError(f"no client replied in round {server_round}")
        arrays, metrics = aggregate(server_round, replies)
        if arrays is not None:
            try:
                shared.check_arrays(shared.as_arrays(arrays), expected)
            except DataError as error:
                raise DataError(
                    f"the strategy {type(strategy).__name__} changed the arrays in round "
                    f"{server_round}: {error}"
                ) from error
        return arrays, metrics

    checked.aggregate_train = aggregate_train
    checked.aggregate_evaluate = aggregate_evaluate
    return checked


def _fitting(
    server_round: int,
    replies: Sequence[Message],
    expected: Mapping[str, Array] | None,
    weight: str | None,
) -> list[Message]:
    """The replies with errors, and those that a strategy can add up; others are left out with a warning.

    ``expected`` are the shared tensors, which replies to training have; None for an evaluation.
    """
    wrong: dict[int, str] = {}
    forms: dict[int, Hashable] = {}
    for k, reply in enumerate(replies):
        if not reply.has_error():
            try:
                forms[k] = _form(reply.content, expected, weight)
            except DataError as error:
                wrong[k] = str(error)
    # Strategies refuse all replies if one has other metrics.
    usual = max(forms.values(), key=[*forms.values()].count, default=None)
    wrong |= {
        k: "its metrics are not those of the other clients"
        for k, form in forms.items()
        if form != usual
    }
    for k, problem in wrong.items():
        node = replies[k].metadata.src_node_id
        text = f"the reply of the client of node {node} in round {server_round}: {problem}"
        if len(wrong) == len(forms) + len(wrong.keys() - forms.keys()):
            raise DataError(f"no client's reply can be used; {text}")
        _log.warning("%s; it is left out", text)
    return [reply for k, reply in enumerate(replies) if k not in wrong]


def _form(content: Any, expected: Mapping[str, Array] | None, weight: str | None) -> Hashable:
    """The names in a reply, which have to be the same for all clients."""
    keys = tuple(content.array_records)
    if expected is not None:
        if len(keys) != 1:
            raise DataError(f"it has {len(keys)} records of arrays, expected one")
        shared.check_arrays(shared.as_arrays(content.array_records[keys[0]]), expected)
    metrics = content.metric_records
    if len(metrics) != 1:
        raise DataError(f"it has {len(metrics)} records of metrics, expected one")
    [(name, record)] = metrics.items()
    rows = record.get(weight) if weight is not None else 1
    number = isinstance(rows, int | float) and not isinstance(rows, bool)
    if not number or not 0 < rows < _MOST_ROWS:
        raise DataError(f"{weight} is {short_repr(rows)}, expected a number of rows above 0")
    sizes = ((n, len(v) if isinstance(v, list) else None) for n, v in record.items())
    return (keys if expected is not None else (), name, frozenset(sizes))


def _evaluation(
    trainer: Trainer, share: shared.Share, data: Any
) -> Callable[[int, ArrayRecord], MetricRecord]:
    rows = data if isinstance(data, tuple) and len(data) in (2, 3) else (data,)

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        shared.load_shared(trainer, arrays, share)
        return require_flower().MetricRecord(trainer.evaluate(*rows))

    return evaluate
