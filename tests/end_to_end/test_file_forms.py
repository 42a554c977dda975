"""Files as people have them: each family in each form is trained like torch trains it, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from tests.end_to_end.file_forms import FORMS, outcome
from tests.end_to_end.file_networks import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporters

OWN = ["ResNet", "MobileNet", "EfficientNet", "YOLO-like", "U-Net"]
"""The networks that need no package but torch."""


@pytest.mark.parametrize("form", ["level 2", "float16"])
@pytest.mark.parametrize("name", ["ResNet"])
def test_convolutional_networks_are_trained(name: str, form: str, tmp_path: Path) -> None:
    found = outcome(name, form, tmp_path)
    assert (found.status, found.why) == ("trained", "")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_file_is_trained_wrongly(name: str, form: str, tmp_path: Path) -> None:
    if name not in OWN:
        pytest.importorskip("transformers")
    found = outcome(name, form, tmp_path)
    if found.status == "no file":
        pytest.skip(found.why)
    assert found.status in ("trained", "refused"), found.why
