"""What tests share: a command, as somebody types it, and numbers."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from typer.testing import CliRunner

from weft_cli.cli import app


def typed(*words: str, code: int = 0, columns: int = 200) -> Any:
    """What comes of a command, its streams without colours."""
    result = CliRunner().invoke(app, words, env={"COLUMNS": f"{columns}", "NO_COLOR": "1"})
    assert result.exit_code == code, f"{words}\n{result.output}\n{result.exception!r}"
    return result


def cli(*words: str, code: int = 0, columns: int = 200) -> str:
    """What a command prints, both streams, without colours or line breaks."""
    shown = typed(*words, code=code, columns=columns).output
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", shown))


def draw(*shape: Any, seed: int = 0) -> Tensor:
    """Normal numbers in fp64, the same wherever they are drawn."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
