"""Files as people have them: each family in each form is trained like torch trains it, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from ortflex_core import require_runtime
from tests.end_to_end.file_networks import FAMILIES
from tests.end_to_end.file_table import FORMS, Outcome, outcome

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporters

OWN = ["Transformer", "ResNet", "MobileNet", "EfficientNet", "YOLO-like", "U-Net"]
"""The networks that need no package but torch."""


def made(name: str, form: str, folder: Path, tools: tuple[int, int] = (0, 0)) -> Outcome:
    """The outcome of a file; skipped without its packages, or where no tools before a version make it."""
    if name not in OWN:
        pytest.importorskip("transformers")
    found = outcome(name, form, folder)
    if found.status == "no file" and require_runtime().version_info < tools:
        pytest.skip(found.why)
    return found


@pytest.mark.parametrize(
    ("name", "form", "operators"),
    [
        ("Transformer", "transformers.optimizer", "Attention SkipLayerNormalization"),
        ("Transformer", "4 bits", "MatMulNBits"),
        ("ResNet", "ORT_ENABLE_EXTENDED", "FusedConv"),
        ("ResNet", "float16", ""),
        ("BERT", "transformers.optimizer", "EmbedLayerNormalization Attention"),
        ("GPT-2", "dynamo", ""),
        ("Llama", "ORT_ENABLE_EXTENDED", "FusedMatMul QuickGelu SimplifiedLayerNormalization"),
        ("Qwen2", "4 bits", "MatMulNBits"),
        ("T5 encoder", "transformers.optimizer", "RelativePositionBias Attention"),
    ],
)
def test_files_are_trained(name: str, form: str, operators: str, tmp_path: Path) -> None:
    """Also those with these operators outside the standard."""
    found = made(name, form, tmp_path, tools=(1, 20))
    assert (found.status, found.why) == ("trained", "")
    assert found.compared
    assert set(operators.split()) <= set(found.operators)


def test_a_file_for_one_machine_is_refused(tmp_path: Path) -> None:
    found = outcome("ResNet", "ORT_ENABLE_ALL", tmp_path)
    if not any(name.startswith("Reorder") for name in found.operators):
        pytest.skip("onnxruntime leaves the layout as it is on this machine")
    assert found.status == "refused"
    assert "save it with ORT_ENABLE_EXTENDED" in found.why


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_file_is_trained_wrongly(name: str, form: str, tmp_path: Path) -> None:
    found = made(name, form, tmp_path, tools=(99, 0))
    assert found.status in ("trained", "refused"), found.why
