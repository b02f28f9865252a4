"""The oracle itself against transformers, where torch and transformers are installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.oracle.folders import FOLDERS
from tests.oracle.model import Oracle
from tests.support.models import AWKWARD, write_hf_model

torch = pytest.importorskip("torch", reason="the comparison with transformers needs torch")
transformers = pytest.importorskip("transformers", reason="the comparison needs transformers")

CASES = {**FOLDERS, **AWKWARD}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    family, arguments = CASES[case]
    folder = write_hf_model(tmp_path, family, dtype="f32", **arguments)
    torch.set_num_threads(1)  # the matrices are tiny
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    ids = np.random.default_rng(1).integers(0, 259, 48)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    actual = Oracle.from_folder(folder).forward(ids)
    assert expected.std() > 0.5
    # transformers keeps angles, softmax and routing in float32 even in a float64 model.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-5)
