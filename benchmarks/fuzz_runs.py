"""Mutated run files and configurations of `benchmarks.fuzz`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from weft_cli.commands.verify import build
from weft_models.declare.run_file import RunSpec

RUN = 'model = "tabular"\nlayout = "rows: ring=2"\nseed = 3\n\n[train]\nsteps = 5\nlr = 1e-3\n'
CONFIGURATION = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
NUMBERS = (-1, 0, 1, 3, 1 << 20, 1 << 40, 10**30, 1.5, None, True, "16", [], {}, "x" * 5000)


class Runs:
    """Makes mutated files of one row or key after another, and has them read."""

    def __init__(self, folder: Path, mutated: Callable[[random.Random, str], str]) -> None:
        self.folder, self.mutated = folder / "runs", mutated
        self.folder.mkdir(exist_ok=True)

    def feed(self, rng: random.Random) -> tuple[str, object, Callable[[], tuple[str, str]]]:
        """A kind of file, its content, and what reads it."""
        return rng.choices((self._run_file, self._configuration), (4, 1))[0](rng)

    def _run_file(self, rng: random.Random) -> tuple[str, object, Callable]:
        text = RUN
        for _ in range(rng.randint(1, 3)):
            text = self.mutated(rng, text)
        path = self.folder / "run.toml"
        path.write_bytes(text.encode(errors="surrogatepass"))

        def call() -> tuple[str, str]:
            RunSpec.load(path).resolved().to_toml()
            return "taken", ""

        return "run file", text, call

    def _configuration(self, rng: random.Random) -> tuple[str, object, Callable]:
        read = dict(CONFIGURATION)
        for _ in range(rng.randint(1, 2)):
            read[rng.choice([*read, "layer_types", "rope_scaling"])] = rng.choice(NUMBERS)
        content = _spoiled(rng, json.dumps(read).encode())
        path = self.folder / "config.json"
        path.write_bytes(content)

        def call() -> tuple[str, str]:
            build("LlamaForCausalLM", path)
            return "taken", ""

        return "configuration", content, call


def _spoiled(rng: random.Random, content: bytes) -> bytes:
    """Some of its bytes, or others at some place; most often all as they are."""
    at = rng.randrange(len(content) + 1)
    how = rng.random()
    if how < 0.15:
        return content[:at]
    if how < 0.3:
        return content[:at] + rng.randbytes(rng.randint(1, 6)) + content[at + 3 :]
    return content
