# %% [markdown]
# # 10. Fine-tune with SFTTrainer and LoRA
#
# Trainers that know nothing of weft train a model whose sequences are split over ranks. You will
#
# - write a fine-tuning script with TRL's `SFTTrainer` and PEFT's LoRA for one process,
# - change two lines, and start it on four ranks that share every sequence,
# - draw the four ranks' curve over one process's: they are the same run.
#
# Needs `pip install -e ".[trainers]"`. Nothing is downloaded: the model is a tiny Llama
# with random weights, and the text is made here.

# %%
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib import pyplot as plt

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A script for one process
#
# Words follow each other as a table says, so that there is something to learn. `finetune` takes the
# trainer's class; everything else is TRL as its own examples have it.

# %%
script = folder / "finetune.py"
script.write_text("""
import os
import random
import tempfile

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

torch.set_num_threads(1)
disable_progress_bars()
logging.set_verbosity_error()
WORDS = 60


def texts(count):
    draw = random.Random(0)
    follows = [draw.sample(range(WORDS), 2) for _ in range(WORDS)]
    for _ in range(count):
        word, words = draw.randrange(WORDS), []
        for _ in range(draw.randint(60, 120)):               # no multiple of four ranks
            words.append(f"w{word}")
            word = draw.choice(follows[word])
        yield {"text": " ".join(words)}


def finetune(trainer_class):
    names = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i + 2 for i in range(WORDS)}
    raw = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(names), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=8, num_key_value_heads=4, pad_token_id=0, eos_token_id=1,
            initializer_range=0.2,
        )
    )
    args = SFTConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to="none",
        disable_tqdm=True, save_strategy="no", logging_steps=1, max_steps=30, learning_rate=1e-2,
        per_device_train_batch_size=4, lr_scheduler_type="constant",
        gradient_accumulation_steps=2, max_grad_norm=1.0,
    )
    trainer = trainer_class(
        model=model, args=args, train_dataset=Dataset.from_list([*texts(64)]),
        processing_class=tokenizer, peft_config=LoraConfig(r=8, target_modules="all-linear"),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history[:-1]                    # the last one is a summary
""")
print(f"{len(script.read_text().splitlines())} lines")

# %% [markdown]
# One process:

# %%
spec = importlib.util.spec_from_file_location("finetune", script)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
one = module.finetune(module.SFTTrainer)
print(f"loss {one[0]['loss']:.3f} -> {one[-1]['loss']:.3f}")

# %% [markdown]
# ## Two lines for four ranks
#
# `trainers.layout` makes the mesh: here all four ranks are one *context group*, which holds the
# same rows and splits their tokens, in zigzag order so that causal work is equal. `trainers.of`
# gives a subclass of the trainer that parallelizes the model under its adapters and lets the loader
# give the four ranks the same rows. Everything else is the script above.

# %%
sharded = folder / "sharded.py"
sharded.write_text("""
import json
import sys

from finetune import SFTTrainer, finetune
from weft_integrations import trainers

layout = trainers.layout("tokens(zigzag): ring=4", "cpu")         # added
log = finetune(trainers.of(SFTTrainer, layout))                   # was: finetune(SFTTrainer)
if layout.rank == 0:
    json.dump(log, open(sys.argv[1], "w"))
""")
command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
command += ["--nproc-per-node", "4", str(sharded), "four.json"]
paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
done = subprocess.run(
    command,
    cwd=folder,
    env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    capture_output=True,
    text=True,
    timeout=240,
)
assert done.returncode == 0, done.stderr[-3000:]
four = json.loads((folder / "four.json").read_text())
print(f"loss {four[0]['loss']:.3f} -> {four[-1]['loss']:.3f}")

# %% [markdown]
# ## The same run
#
# Loss, the gradient's norm before it is clipped, and the accuracy that TRL logs, step by step. Adam
# divides by the size of gradients, so roundings grow slowly; they stay far below what a plot shows.

# %%
figure, panels = plt.subplots(1, 3, figsize=(11, 3), constrained_layout=True)
for panel, name in zip(panels, ("loss", "grad_norm", "mean_token_accuracy")):
    panel.plot([step[name] for step in one], lw=5, alpha=0.35, label="one process")
    panel.plot([step[name] for step in four], lw=1.2, label="four ranks")
    panel.set(xlabel="step", title=name)
panels[0].legend()

# %%
for name in ("loss", "grad_norm"):
    apart = max(abs(a[name] - b[name]) / a[name] for a, b in zip(one, four, strict=True))
    print(f"{name}: at most {apart:.0e} of it apart in {len(one)} steps")
    assert apart < 1e-4
assert one[-1]["loss"] < 0.8 * one[0]["loss"]
assert [a["num_tokens"] for a in one] == [b["num_tokens"] for b in four]

# %% [markdown]
# On more ranks the rest are replicas: with eight, `trainers.layout("tokens(zigzag): ring=4")` makes
# two groups, and each has different rows. The guide, `docs/trainers.md`, names
# the other trainers, loops around accelerate and Fabric, and settings that are refused.
#
# Ranks and launchers are the subject of [From a laptop to a cluster](08_laptop_to_cluster.ipynb).
