"""Examples are run as they stand there, offline."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import ROOT


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_lora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers, peft = (pytest.importorskip(n) for n in ("transformers", "peft"))
    assert transformers is not None
    lora = example("lora")
    whole = lora.main(["--rounds", "3"])
    half = lora.main(["--rounds", "3", "--freeze-a", "--save", str(tmp_path / "adapters")])
    for result in (whole, half):
        losses = [record["client_loss_mean"] for record in result.history]
        assert losses[-1] < losses[0] - 0.05
    assert half.history[0]["bytes_up"] < 0.7 * whole.history[0]["bytes_up"]
    assert "4 clients" in capsys.readouterr().out
    base, _ = lora.model_and_tokens(None, 32)
    read = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").state_dict()
    for name, value in half.model.state_dict().items():
        assert torch.equal(read[name], value)
