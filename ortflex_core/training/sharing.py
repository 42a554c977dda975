"""The methods of a Trainer that download a model from the Hugging Face Hub and upload one."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from ortflex_core.compiler.model.model import Model
from ortflex_core.kernel.errors import ConfigError, OrtflexError, short_repr
from ortflex_core.kernel.tracebacks import short_tracebacks
from ortflex_core.training.artifacts import hub as repository
from ortflex_core.training.artifacts.model_card import Card
from ortflex_core.training.config.arguments import Arguments
from ortflex_core.training.config.components import Parts, to_plain
from ortflex_core.training.config.toml import to_toml

# Arguments about this process only, which do not describe the model.
_LOCAL = frozenset(
    {
        "callbacks",
        "progress",
        "distributed",
        "device",
        "backend",
        "threads",
        "prefer",
        "shard_state",
    }
)


@short_tracebacks
class SharesModels:
    """The methods of a Trainer for the Hugging Face Hub."""

    @classmethod
    def from_hub(
        cls,
        repo_id: str,
        filename: str | None = None,
        *,
        revision: str | None = None,
        api: Any = None,
        **arguments: Any,
    ) -> Self:
        """A Trainer of a model on the Hugging Face Hub, with the data files that belong to the model.

        Files are kept in the cache of ``huggingface_hub`` (extra ``hub``); files in the cache need
        no network.

        Args:
            repo_id: the repository, ``owner/name``.
            filename: the model in it, such as ``onnx/model.onnx``; not needed if there is only one.
            revision: a branch, a tag or a commit; by default the main branch.
            api: a ``huggingface_hub.HfApi``, for your own token or address.
            arguments: those of the Trainer.

        Raises:
            ConfigError: several models and none is named, or as for the Trainer.
            ModelError: there is no such repository, revision or file, or the Hub cannot be reached.

        Example:
            >>> trainer = Trainer.from_hub("me/digits", loss="log_loss")  # doctest: +SKIP
            >>> trainer.fit(X, y)                                         # doctest: +SKIP
            >>> trainer.push_to_hub("me/digits")                          # doctest: +SKIP
        """
        free_batch, plugins = arguments.get("free_batch", False), arguments.get("plugins")
        with repository.open_model(repo_id, filename, revision, api) as (path, name):
            model = Model(path, free_batch=free_batch, plugins=plugins)
        model.label = f"{repo_id}/{name}"
        trainer_class: Any = cls
        return trainer_class(model, **arguments)  # type: ignore[no-any-return]

    def push_to_hub(
        self: Any,
        repo_id: str,
        filename: str = "model.onnx",
        *,
        revision: str | None = None,
        private: bool | None = None,
        message: str = "Train with ortflex",
        metadata: Mapping[str, Any] | None = None,
        api: Any = None,
    ) -> str:
        """Upload the model with its current weights, ``history.csv`` and a model card; returns the address.

        The card says what was trained, the figures of the last epoch, and how to run the model and
        to train it further. A card that you edited, without the line that marks it as written by
        ortflex, is not replaced.

        Args:
            repo_id: the repository, ``owner/name``, which is created if it does not exist.
            filename: the name of the model in it.
            revision: a branch that exists; by default the main branch.
            private: make a new repository private.
            message: of the commit.
            metadata: further front matter of the card: ``{"license": "mit", "datasets":
                ["mnist"]}``.
            api: as for :meth:`from_hub`.

        Raises:
            ConfigError: huggingface_hub is not installed, or a name or the metadata are wrong.
            OutputError: the Hub refuses it or cannot be reached.
        """
        place = Path(filename)
        if place.suffix != ".onnx" or place.is_absolute() or ".." in place.parts:
            raise ConfigError(
                f"filename: expected a name with the ending .onnx, got {short_repr(filename)}"
            )
        client = repository.client(api)
        card = Card(
            repo_id=repo_id,
            filename=filename,
            inputs=[i.name for i in self.model.inputs],
            summary=self.summary(),
            history=self.history_,
            metrics=[str(m.name) for m in self._internals.setup.metrics],
            recipe=_recipe(self._internals.arguments, Parts(self.plugins)),
            metadata=dict(metadata or {}),
        )
        text = card.text()
        with tempfile.TemporaryDirectory(prefix="ortflex-") as name:
            folder = Path(name)
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            self.export(folder / place)
            (folder / "README.md").write_text(text, "utf-8")
            if len(self.history_):
                self.history_.to_csv(folder / "history.csv")
            return repository.push(repo_id, folder, message, revision, private, client)


def _recipe(arguments: Mapping[str, Any], parts: Parts) -> dict[str, str]:
    """The arguments that are not the defaults, as TOML, without those that cannot be written to a file."""
    out = {}
    for field in attrs.fields(Arguments):
        value = arguments[field.name]
        if field.name in _LOCAL or value is None or value == field.default:
            continue
        named = isinstance(value, str | Mapping)
        try:
            out[field.name] = to_toml(
                to_plain(value if named else parts.spell_out(field.name, value))
            )
        except (OrtflexError, TypeError):
            continue
    return out
