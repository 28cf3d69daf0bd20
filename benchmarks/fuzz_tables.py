"""Mutated tables, run files, configurations and files of tokens of `benchmarks.fuzz`."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

from weft_cli.commands.verify import build
from weft_models.declare.run_file import RunSpec
from weft_models.tables.files import read_pair
from weft_models.tables.frames import Numbers
from weft_models.train.batches import TokenFile

TRAIN = """id,size,colour,when,until,kind
1,3.5,red,2024-01-01,9999-12-31,cat
2,1.5,blue,2024-02-01,2262-04-12,dog
3,NA,red,1600-01-01,2024-01-31,cat
4,"1,000",green,2024-03-05,,dog
"""
TEST = TRAIN.replace("cat", "").replace("dog", "cat")
RUN = 'model = "tabular"\nlayout = "rows: ring=2"\nseed = 3\n\n[train]\nsteps = 5\nlr = 1e-3\n'
CONFIGURATION = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
#: Cells and bytes that tables bring.
CELLS = (
    "0000-00-00", "10000-01-01", "2024-13-41", "1e400", "-1e-400", "٣", "1_000", "TRUE", "\x00",
    "\ufeff", "\u2028", '"', '""', "'", ",,,", ";", "\t", "\r", "\r\n\r\n", "\n", "NaT", "inf",
    "0x10", "31/12/9999", "12/31/9999", "2024-01-01T25:00", "9" * 400, "é" * 300, "a" * 70_000,
    "," * 3000, "Unnamed: 1", "more fields than names", "kind", "size.1", "=cmd()",
)  # fmt: skip
NAMES = ("t.csv", "t.csv.gz", "t.bz2", "t.xz", "t.zip", "t.tar", "t.zst", "t.txt", "t")
NUMBERS = (-1, 0, 1, 3, 1 << 20, 1 << 40, 10**30, 1.5, None, True, "16", [], {}, "x" * 5000)


def _zip(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("t.csv", content)
    return file.getvalue()


def _tar(content: bytes) -> bytes:
    file, member = io.BytesIO(), tarfile.TarInfo("t.csv")
    member.size = len(content)
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


PACK = (bytes, bytes, gzip.compress, bz2.compress, lzma.compress, _zip, _tar)


class Tables:
    """Makes mutated files of one row or key after another, and has them read."""

    def __init__(self, folder: Path, mutated: Callable[[random.Random, str], str]) -> None:
        self.folder, self.mutated = folder / "tables", mutated
        self.folder.mkdir(exist_ok=True)

    def feed(self, rng: random.Random) -> tuple[str, object, Callable[[], tuple[str, str]]]:
        """A kind of file, its content, and what reads it."""
        feeds = (self._table, self._run_file, self._tokens, self._configuration)
        return rng.choices(feeds, (12, 4, 2, 1))[0](rng)

    def _table(self, rng: random.Random) -> tuple[str, object, Callable]:
        paths, contents = [], []
        for number, text in enumerate((TRAIN, TEST)):
            for _ in range(rng.randint(0, 3)):
                text = self._changed(rng, text)
            content = text.encode(rng.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16")), "replace")
            content = _spoiled(rng, rng.choice(PACK)(content))
            path = self.folder / f"{number}{rng.choice(NAMES)}"
            path.unlink(missing_ok=True)
            if rng.random() < 0.02:
                os.mkfifo(path)
            else:
                path.write_bytes(content)
            paths.append(path)
            contents.append(content)

        def call() -> tuple[str, str]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pair = read_pair(*paths, "kind", drop=("id",) if rng.random() < 0.5 else ())
                numbers = Numbers(pair.x_train)
                assert numbers(pair.x_train).shape == pair.x_train.shape
                assert numbers(pair.x_test).shape == pair.x_test.shape
            return "taken", ""

        return "table", contents, call

    def _changed(self, rng: random.Random, text: str) -> str:
        if rng.random() < 0.5:
            return self.mutated(rng, text)
        at = rng.randrange(len(text) + 1)
        return text[:at] + rng.choice(CELLS) + text[at:]

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

    def _tokens(self, rng: random.Random) -> tuple[str, object, Callable]:
        content = rng.randbytes(rng.randrange(40))
        lengths = [rng.choice((0, 1, 2, 5, 10**12, -1)) for _ in range(rng.randrange(4))]
        path = self.folder / "tokens.bin"
        path.write_bytes(content)

        def call() -> tuple[str, str]:
            tokens = TokenFile(path, lengths, rng.choice(("uint8", "uint16", "int32")))
            for number, length in enumerate(lengths):
                assert len(tokens.read(number, 0, length)) == length
            return "taken", ""

        return "tokens", (content, lengths), call

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
