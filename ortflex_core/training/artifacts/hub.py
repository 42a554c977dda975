"""Files of a repository on the Hugging Face Hub, read and written by the Hub's client."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ortflex_core.compiler.onnx_files import model_file, vetting
from ortflex_core.compiler.onnx_files.external_data import is_outside
from ortflex_core.kernel.errors import ConfigError, ModelError, suggest
from ortflex_core.kernel.files import OutputError
from ortflex_core.kernel.install_command import install_command
from ortflex_core.kernel.regular_files import open_regular, read_text, reason
from ortflex_core.kernel.version import __version__
from ortflex_core.training.artifacts.model_card import MARK

_README = "README.md"


def client(api: Any) -> Any:
    """The client: the given one, or a new one."""
    if api is not None:
        return api
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError(
            "models on the Hugging Face Hub need huggingface_hub, which is not installed: "
            f"{install_command('hub')}"
        ) from error
    return hub.HfApi(library_name="ortflex", library_version=__version__)


@contextlib.contextmanager
def open_model(
    repo_id: str, filename: str | None, revision: str | None, api: Any
) -> Iterator[tuple[Path, str]]:
    """The path of a model with its data files, and its name in the repository.

    The path is that of the client's cache; if there are data files, it is in a temporary folder,
    because the cache consists of links, and the data of a model must be next to it.

    Raises:
        ConfigError: not a name of a repository; or several models, and none is named.
        ModelError: there is no such repository, revision or file, or the Hub cannot be reached.
    """
    hub = client(api)
    if filename is None:
        filename = _only_model(hub, repo_id, revision)
    path = _download(hub, repo_id, filename, revision)
    places = _data_files(path, f"{repo_id}/{filename}", PurePosixPath(filename))
    if not places:
        yield path, filename
        return
    with tempfile.TemporaryDirectory(prefix="ortflex-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _link_or_copy(path, folder / path.name, f"{repo_id}/{filename}")
        for place in places:
            inside = PurePosixPath(filename).parent / place
            given = _download(hub, repo_id, str(inside), revision)
            _link_or_copy(given, folder / place, f"{repo_id}/{inside}")
        yield folder / path.name, filename


def _link_or_copy(source: Path, target: Path, label: str) -> None:
    """The file at another place: a hard link if the file system supports it, otherwise a copy."""
    try:
        _place(source, target)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        raise ModelError(f"{label} cannot be read: {reason(error)}") from error


def _place(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        with open_regular(source) as given, open(target, "xb") as copy:
            shutil.copyfileobj(given, copy)


def _data_files(path: Path, label: str, own: PurePosixPath) -> list[PurePosixPath]:
    """The files in which a model has tensors, relative to it; ``own`` is the path of the model."""
    try:
        model = model_file.read_proto(path)
    except Exception as error:
        raise ModelError(f"{label} is not an ONNX model or is truncated: {error}") from error
    tensors = [*model.graph.initializer, *vetting.inner_tensors(model)]
    entries = [e for t in tensors if is_outside(t) for e in t.external_data]
    places = dict.fromkeys(PurePosixPath(e.value) for e in entries if e.key == "location")
    for place in places:  # "./a" and "a" are one path here
        if place.is_absolute() or ".." in place.parts:
            raise ModelError(f"{label}: {str(place)!r} is outside the model's folder")
        if not place.parts or str(place) == own.name or "\0" in str(place):
            raise ModelError(
                f"{label}: a tensor has its data in {str(place)!r}, which is not the name of a data file"
            )
    inner = set[PurePosixPath]().union(*(p.parents for p in places)) & {
        PurePosixPath(own.name),
        *places,
    }
    if inner:
        raise ModelError(f"{label}: {str(min(inner))!r} is a file and a folder of data files")
    return list(places)


def _download(hub: Any, repo_id: str, filename: str, revision: str | None) -> Path:
    with _explained(hub, repo_id, revision, filename):
        return Path(hub.hf_hub_download(repo_id, filename, revision=revision))


def _only_model(hub: Any, repo_id: str, revision: str | None) -> str:
    with _explained(hub, repo_id, revision):
        files = _files(hub, repo_id, revision)
    models = sorted(f for f in files if f.endswith(".onnx"))
    if len(models) == 1:
        return models[0]
    if models:
        listed = ", ".join(map(repr, models[:10])) + ", …" * (len(models) > 10)
        raise ConfigError(
            f"{repo_id} has {len(models)} models; choose one with filename=: {listed}"
        )
    others = ", ".join(sorted(files)[:10]) or "no files"
    raise ModelError(f"{repo_id} has no .onnx file; it has {others}")


def _files(hub: Any, repo_id: str, revision: str | None) -> list[str]:
    """The files of a repository; without a connection, those in the cache."""
    try:
        return list(hub.list_repo_files(repo_id, revision=revision))
    except Exception as error:
        if not _unreachable(error):
            raise
        try:
            folder = Path(hub.snapshot_download(repo_id, revision=revision, local_files_only=True))
        except Exception:
            raise error from None
    return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]


def _names(error: BaseException) -> set[str]:
    """The classes of an error; the client's are known by name, so that it need not be imported."""
    return {cls.__name__ for cls in type(error).__mro__}


def _unreachable(error: BaseException) -> bool:
    names = _names(error)
    if names & {"HfHubHTTPError", "HFValidationError"}:
        return False
    return bool(names & {"OfflineModeIsEnabled", "ConnectionError", "HTTPError", "OSError"})


@contextlib.contextmanager
def _explained(
    hub: Any, repo_id: str, revision: str | None, filename: str | None = None
) -> Iterator[None]:
    try:
        yield
    except (ConfigError, ModelError):
        raise
    except Exception as error:
        names = _names(error)
        what = repo_id if filename is None else f"{repo_id}/{filename}"
        if "HFValidationError" in names:
            raise ConfigError(
                f"repo_id: expected 'owner/name' of a repository on the Hugging Face Hub, got {repo_id!r}"
            ) from error
        if "GatedRepoError" in names:
            text = (
                "access to it is restricted: request access on its page, then run `hf auth login`"
            )
        elif "RepositoryNotFoundError" in names:
            text = "there is no such repository, or it is private: run `hf auth login`"
        elif "RevisionNotFoundError" in names:
            text = f"there is no revision {revision!r}"
        elif "LocalEntryNotFoundError" in names or _unreachable(error):
            text = f"the Hub cannot be reached, and the local cache does not have it ({error})"
        elif "EntryNotFoundError" in names and filename is not None:
            text = "there is no such file" + _neighbors(hub, repo_id, revision, filename)
        else:
            text = f"the Hub responded with {type(error).__name__}: {error}"
        raise ModelError(f"{what}: {text}") from error


def _neighbors(hub: Any, repo_id: str, revision: str | None, filename: str) -> str:
    try:
        return f"; {suggest(filename, _files(hub, repo_id, revision))}"
    except Exception:  # it is an addition to another error
        return ""


def push(
    repo_id: str, folder: Path, message: str, revision: str | None, private: bool | None, api: Any
) -> str:
    """Upload a folder to a repository, which is created if it does not exist; returns its address.

    A card that a user has edited, without ortflex's line, is not replaced.

    Raises:
        ConfigError: not a name of a repository, or huggingface_hub is not installed.
        OutputError: the Hub refuses the upload or cannot be reached.
    """
    hub = client(api)
    try:
        with _explained(hub, repo_id, revision):
            hub.create_repo(repo_id, private=private, exist_ok=True)
            if not _may_write_card(hub, repo_id, revision):
                (folder / _README).unlink(missing_ok=True)
            done = hub.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=message, revision=revision
            )
    except ModelError as error:
        raise OutputError(f"cannot push to {error}") from error.__cause__
    return str(getattr(done, "commit_url", done))


def _may_write_card(hub: Any, repo_id: str, revision: str | None) -> bool:
    """Whether the repository has no card, an empty one of the Hub, or one that ortflex wrote."""
    if not hub.file_exists(repo_id, _README, revision=revision):
        return True
    text = read_text(hub.hf_hub_download(repo_id, _README, revision=revision))
    return MARK in text or not text.strip()
