"""Models from the Hugging Face Hub and back: the real client on its cache, and a stand-in of its server."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import onnx
import pytest

from ortflex import Trainer
from ortflex_core import ConfigError, ModelError, OutputError
from tests import models
from tests.training import make, plugins, regression

pytestmark = pytest.mark.once
REPOSITORY = "some-one/digits"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of huggingface_hub with one repository, without a network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def put(cache: Path, files: dict[str, bytes], repo: str = REPOSITORY, ref: str = "main") -> None:
    """Files as the client lays them out: contents in blobs, links to them in the snapshot of a commit."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    commit = hashlib.sha1(ref.encode()).hexdigest()
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(content)
        link = folder / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))


def saved(folder: Path, model: onnx.ModelProto, **options: Any) -> dict[str, bytes]:
    folder.mkdir()
    onnx.save(model, folder / "model.onnx", **options)
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def from_hub(*arguments: Any, **options: Any) -> Trainer:
    options = {"loss": "squared_error", "progress": False, "plugins": plugins()} | options
    return Trainer.from_hub(REPOSITORY, *arguments, **options)


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("folder", ["", "onnx/"])
def test_a_model_of_the_cache_is_trained_as_the_file_is(
    hub: Path, tmp_path: Path, external: bool, folder: str
) -> None:
    model = models.mlp()
    options = {"save_as_external_data": True, "size_threshold": 0, "location": "model.onnx_data"}
    files = saved(tmp_path / "files", model, **(options if external else {}))
    assert len(files) == (2 if external else 1)
    put(hub, {folder + name: content for name, content in files.items()} | {"README.md": b"text"})
    x, y = regression(features=6)
    trainer = from_hub(epochs=2, optimizer="sgd")
    twin = make(models.mlp(), epochs=2)
    assert trainer.model.label == f"{REPOSITORY}/{folder}model.onnx"
    trainer.fit(x, y), twin.fit(x, y)
    np.testing.assert_allclose(trainer.predict(x), twin.predict(x), rtol=1e-5, atol=1e-6)
    onnx.checker.check_model(trainer.export())


def test_a_revision_and_a_file_can_be_named(hub: Path, tmp_path: Path) -> None:
    files = saved(tmp_path / "files", models.linear())
    put(hub, {"a.onnx": files["model.onnx"], "b.onnx": files["model.onnx"]}, ref="second")
    assert from_hub("b.onnx", revision="second").model.label.endswith("b.onnx")
    with pytest.raises(ConfigError, match=r"choose one with filename=: 'a.onnx', 'b.onnx'"):
        from_hub(revision="second")


def test_a_repository_without_a_model_says_what_it_has(hub: Path) -> None:
    put(hub, {"README.md": b"text", "model.safetensors": b"x"})
    with pytest.raises(ModelError, match=r"no \.onnx file; it has README.md, model.safetensors"):
        from_hub()


@pytest.mark.parametrize("filename", [None, "model.onnx"])
def test_an_unreachable_repository_is_an_error(hub: Path, filename: str | None) -> None:
    with pytest.raises(ModelError, match="cannot be reached, and the local cache does not have it"):
        from_hub(filename)


def test_a_wrong_name_of_a_repository_is_a_config_error(hub: Path) -> None:
    with pytest.raises(ConfigError, match="expected 'owner/name'"):
        Trainer.from_hub("a/b/c", "model.onnx", loss="squared_error")


def test_data_outside_of_the_models_folder_are_refused(hub: Path, tmp_path: Path) -> None:
    options = {"save_as_external_data": True, "size_threshold": 0, "location": "data"}
    files = saved(tmp_path / "files", models.mlp(), **options)
    model = onnx.load_from_string(files["model.onnx"])
    for tensor in model.graph.initializer:
        next(e for e in tensor.external_data if e.key == "location").value = "../data"
    put(hub, {"in/model.onnx": model.SerializeToString(), "data": files["data"]})
    with pytest.raises(ModelError, match="outside the model's folder"):
        from_hub()


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (from_hub, lambda: make(models.linear()).push_to_hub(REPOSITORY)):
        with pytest.raises(ConfigError, match=r"pip install .*\[hub\]"):
            call()


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder, self.private = folder, None

    def create_repo(self, repo_id: str, *, exist_ok: bool, private: bool | None = None) -> str:
        assert exist_ok
        self.private = private
        (self.folder / repo_id).mkdir(parents=True, exist_ok=True)
        return repo_id

    def file_exists(self, repo_id: str, filename: str, *, revision: str | None = None) -> bool:
        return (self.folder / repo_id / filename).exists()

    def hf_hub_download(self, repo_id: str, filename: str, *, revision: str | None = None) -> str:
        from huggingface_hub.errors import EntryNotFoundError

        if not self.file_exists(repo_id, filename):
            raise EntryNotFoundError(filename)
        return str(self.folder / repo_id / filename)

    def list_repo_files(self, repo_id: str, *, revision: str | None = None) -> list[str]:
        root = self.folder / repo_id
        return [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]

    def upload_folder(self, *, repo_id: str, folder_path: Path, **more: str | None) -> str:
        shutil.copytree(folder_path, self.folder / repo_id, dirs_exist_ok=True)
        return f"https://example.org/{repo_id}/commit/1"


@pytest.fixture
def api(tmp_path: Path) -> Any:
    """A client whose calls must fit the real one's signatures, in front of the server."""
    hub = pytest.importorskip("huggingface_hub")
    server, double = Server(tmp_path / "server"), create_autospec(hub.HfApi, instance=True)
    names = ("create_repo", "file_exists", "hf_hub_download", "list_repo_files", "upload_folder")
    for name in names:
        getattr(double, name).side_effect = getattr(server, name)
    double.server = server
    return double


def test_a_trained_model_is_pushed_and_trained_further(api: Any) -> None:
    x, y = regression(features=6)
    trainer = make(models.mlp(), epochs=3, optimizer={"name": "adam", "beta1": 0.8}, metrics=["r2"])
    trainer.fit(x, y, validation_data=0.2)
    address = trainer.push_to_hub(
        REPOSITORY, private=True, metadata={"license": "mit", "datasets": ["é"]}, api=api
    )
    assert address.startswith("https://")
    assert api.server.private is True
    assert sorted(api.list_repo_files(REPOSITORY)) == ["README.md", "history.csv", "model.onnx"]
    again = from_hub(api=api)
    np.testing.assert_array_equal(again.predict(x), trainer.predict(x))
    again.fit(x, y)

    card = (api.server.folder / REPOSITORY / "README.md").read_text("utf-8")
    yaml = pytest.importorskip("yaml")
    data = yaml.safe_load(card.split("---\n", 2)[1])
    assert data == {
        "library_name": "ortflex",
        "tags": ["onnx", "ortflex"],
        "metrics": ["r2"],
        "license": "mit",
        "datasets": ["é"],
    }
    recipe = tomllib.loads(card.split("```toml\n")[1].split("```")[0])
    assert recipe["optimizer"] == {"name": "adam", "beta1": 0.8}
    assert set(recipe) >= {"loss", "optimizer", "epochs", "metrics"}
    assert "## Epoch 3, the last one" in card
    assert f"| validation_loss | {trainer.validation_losses_[-1]:.4g} |" in card
    assert "Trainer.from_hub('some-one/digits', 'model.onnx', loss='squared_error'" in card
    for block in card.split("```python\n")[1:]:
        compile(block.split("```")[0].replace("…", "None"), "card", "exec")


def test_a_card_that_was_edited_stays(api: Any) -> None:
    trainer = make(models.linear())
    card = api.server.folder / REPOSITORY / "README.md"
    trainer.push_to_hub(REPOSITORY, api=api)
    first = card.read_text("utf-8")
    assert "last one" not in first
    trainer.fit(*regression())
    trainer.push_to_hub(REPOSITORY, api=api)
    assert card.read_text("utf-8") != first
    card.write_text("my own words", "utf-8")
    trainer.push_to_hub(REPOSITORY, api=api)
    assert card.read_text("utf-8") == "my own words"


def test_a_file_that_does_not_exist_names_its_neighbors(api: Any) -> None:
    make(models.linear()).push_to_hub(REPOSITORY, "model.onnx", api=api)
    with pytest.raises(ModelError, match=r"there is no such file; did you mean 'model.onnx'"):
        from_hub("modle.onnx", api=api)


def test_a_refused_upload_is_an_output_error(api: Any) -> None:
    from huggingface_hub.errors import HTTPError

    api.upload_folder.side_effect = HTTPError("no space left")
    with pytest.raises(OutputError, match=r"cannot push to some-one/digits: .*no space left"):
        make(models.linear()).push_to_hub(REPOSITORY, api=api)


@pytest.mark.parametrize("filename", ["model.txt", "/model.onnx", "../model.onnx"])
def test_a_wrong_name_of_the_file_is_refused(api: Any, filename: str) -> None:
    with pytest.raises(ConfigError, match=r"filename: expected a name with the ending \.onnx"):
        make(models.linear()).push_to_hub(REPOSITORY, filename, api=api)
    assert not api.upload_folder.called


def test_metadata_that_no_card_can_hold_are_refused(api: Any) -> None:
    with pytest.raises(ConfigError, match="metadata: when: expected strings"):
        make(models.linear()).push_to_hub(REPOSITORY, metadata={"when": {1, 2}}, api=api)
