"""The model card of a trained model: front matter that the Hub reads, and a page for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core.kernel.errors import ConfigError, short_repr
from ortflex_core.kernel.version import __version__

if TYPE_CHECKING:
    from ortflex_core.training.views.history import History
    from ortflex_core.training.views.summary import Summary

MARK = "<!-- Written by ortflex. Delete this line to keep your own text at the next push. -->"
_SKIPPED = ("data", "runtime")


@attrs.frozen(kw_only=True)
class Card:
    """The content of a model card.

    Args:
        repo_id: the repository, ``owner/name``.
        filename: the model's file in it.
        inputs: the names of the model's inputs.
        summary: what was trained, and how.
        history: the epochs of the training.
        metrics: names of the metrics.
        recipe: the arguments of the Trainer that are not the defaults, as TOML by name.
        metadata: further front matter, such as ``license`` or ``datasets``.
    """

    repo_id: str
    filename: str
    inputs: Sequence[str]
    summary: Summary
    history: History
    metrics: Sequence[str]
    recipe: Mapping[str, str]
    metadata: Mapping[str, Any] = attrs.field(factory=dict)

    def text(self) -> str:
        """The card, in Markdown."""
        front = {
            "library_name": "ortflex",
            "tags": ["onnx", "ortflex"],
            **({"metrics": list(self.metrics)} if self.metrics else {}),
            **self.metadata,
        }
        sections = [
            "\n".join(["---", *_yaml(front), "---"]),
            MARK,
            f"# {self.repo_id.rpartition('/')[2]}",
            f"An ONNX model, trained with ortflex {__version__}.",
            _table([(k, v) for k, v in self.summary.facts.items() if k not in _SKIPPED]),
            *self._epoch(),
            "## Run it",
            _code("python", self._run()),
            "## Train it further",
            "Install ortflex with the extras `default` and `hub`. `X` are rows of the inputs, `y` "
            "their labels.",
            _code("python", self._train()),
        ]
        if self.recipe:
            lines = [f"{name} = {value}" for name, value in self.recipe.items()]
            sections += ["## Recipe", _code("toml", "\n".join(lines))]
        return "\n\n".join(sections) + "\n"

    def _epoch(self) -> list[str]:
        if not len(self.history):
            return []
        last = dict(list(self.history)[-1])
        number = int(last.pop("epoch"))
        last.pop("seconds", None)
        rows = [(k, f"{v:,}" if isinstance(v, int) else f"{v:.4g}") for k, v in last.items()]
        return [f"## Epoch {number}, the last one", _table(rows)]

    def _run(self) -> str:
        feeds = ", ".join(f"{name!r}: …" for name in self.inputs)
        return (
            "import onnxruntime\n"
            "from huggingface_hub import hf_hub_download\n\n"
            f"path = hf_hub_download({self.repo_id!r}, {self.filename!r})\n"
            "session = onnxruntime.InferenceSession(path)\n"
            f"outputs = session.run(None, {{{feeds}}})"
        )

    def _train(self) -> str:
        import tomllib

        names = [n for n in ("loss", "optimizer", "learning_rate") if n in self.recipe]
        values = tomllib.loads("\n".join(f"{name} = {self.recipe[name]}" for name in names))
        given = "".join(f", {name}={value!r}" for name, value in values.items())
        return (
            "from ortflex import Trainer\n\n"
            f"trainer = Trainer.from_hub({self.repo_id!r}, {self.filename!r}{given})\n"
            "trainer.fit(X, y)\n"
            f"trainer.push_to_hub({self.repo_id!r}, {self.filename!r})"
        )


def _yaml(table: Mapping[str, Any]) -> list[str]:
    """Front matter: JSON values are YAML, too.

    Raises:
        ConfigError: a value that is not plain.
    """
    lines = []
    for name, value in table.items():
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"metadata: {name}: expected strings, numbers, booleans, lists and tables, got "
                f"{short_repr(value)}"
            ) from error
        lines.append(f"{json.dumps(name, ensure_ascii=False)}: {text}")
    return lines


def _table(rows: Sequence[tuple[str, str]]) -> str:
    escaped = [(k, " ".join(v.replace("|", "\\|").split())) for k, v in rows]
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in escaped)])


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
