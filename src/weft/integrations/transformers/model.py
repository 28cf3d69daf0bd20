"""Hugging Face transformers on a layout: `parallelize(model, layout)`, and the model is unmodified.

transformers lets anyone register an attention function and the function that makes its masks;
`transformers_calls` has weft's, and `transformers_hooks` puts them in. What needs more than a
rank's own tokens is in `transformers_whole`. What the model asks for and weft cannot honour is
refused by name, on every rank, and `transformers_verify` checks that the model on ranks is the
model.

Activations are (batch, tokens, embed), and every rank holds its own tokens. A `Batch` says what a
shard cannot know: the global length, packed documents, padding.
"""

from __future__ import annotations

from torch import nn

from ...layout import Layout
from .batches import Batch, shard_batch, shift, token_loss
from .hooks import check_kind, check_layout, install, uninstall
from .verification import verify as transformers_verify
from .verification.verify import Verified, verify

__all__ = [
    "Batch",
    "Verified",
    "parallelize",
    "restore",
    "shard_batch",
    "shift",
    "token_loss",
    "verify",
]


def parallelize(
    model: nn.Module,
    layout: Layout,
    axis: str = "tokens",
    embeddings: nn.Module | None = None,
    verify: bool = True,
) -> nn.Module:
    """Make a transformers model run sequence-parallel on a layout; returns the model.

    The model is checked first: on a short random input it runs whole and on virtual ranks, and a
    difference beyond rounding is refused. What it does only with more tokens or other values than
    were tried is not seen (see `verify`).

    Afterwards `model(**shard_batch(batch, layout))`, or `model(input_ids=local)` where all ranks
    hold equally many tokens, gives this rank's shard of the outputs. Position ids are filled in
    with the global ones. With labels the output has the loss over all ranks' tokens, whose
    gradients are summed over ranks in one of three ways:

        layout.sync_gradients(model)                  after backward
        weft.parallelize(model, layout, "fsdp")       during backward: weights are sharded too
        weft.parallelize(model, layout, "ddp")        during backward

    DDP and FSDP as torch makes them average instead, which would make gradients too small by the
    number of ranks, so training calls with labels are refused there. Hugging Face's `Trainer` wraps
    a model by DDP itself, and its sampler gives ranks different rows: write the loop yourself
    around `shard_batch`, or keep DDP out, hand every rank the same rows, and call `sync_gradients`
    in a callback's `on_pre_optimizer_step`.

    The loss is made over all ranks where the model's own is the cross-entropy of the next token, of
    masked tokens or of tokens' classes, and its routers' loss is added. Another loss of tokens, and
    whatever else a model adds, is refused. Where no token of any rank has a label the loss is NaN,
    as the model's is.

    Dropout within attention is refused, and so are whole layers or paths that are dropped at random
    (`layerdrop`, `drop_path_rate`), which every rank would draw otherwise. Dropout elsewhere draws
    one mask for each rank's chunk, from that rank's generator: once the weights are made, give
    every rank that holds other tokens a seed of its own, `torch.manual_seed(seed + layout.rank)`,
    or their chunks drop alike.

    Pooled outputs (`pooler_output`, the logits of
    a sequence or image classification head) and router logits come whole to every rank; the same
    loss of them on every rank, and `sync_gradients`, give the gradients of one process.

    Compile the layers, `layer.compile(fullgraph=True)`, and not the whole model, whose hooks ask
    the other ranks. A graph belongs to one mask: packed documents of other lengths, and chunks of
    another uneven length, are compiled anew.

    Args:
        model: a transformers model that takes its attention from the attention interface. Have its
            gradients summed, in one of the three ways, afterwards.
        layout: a built layout. Models are not split over `heads` dims by this function.
        axis: the layout's name for the tokens.
        embeddings: for models that make their tokens from something else (a ViT): the submodule
            whose output (batch, tokens, embed) is whole on every rank and is to be split. Found by
            itself where the model has one submodule named `embeddings`.
        verify: check the model now. Without it a model may compute something else on ranks.

    Raises:
        UnsupportedError: a model outside of transformers' attention interface, or one that is
            another model on ranks. In calls: caches, attention weights, cross-attention, dropout in
            attention or of layers, losses that weft does not make, biases, masks given as tensors,
            `logits_to_keep`, another attention implementation set since.
        DeclarationError: a model that is parallelized already, or whose weights are not there; a
            layout without the axis, or whose keys are split otherwise than its queries.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2)).eval()
    >>> layout = Layout.single()
    >>> _ = parallelize(model, layout)
    >>> ids = torch.arange(6)[None]
    >>> out = model(**shard_batch({"input_ids": ids, "labels": ids}, layout))
    >>> out.logits.shape, out.loss.shape
    (torch.Size([1, 6, 10]), torch.Size([]))
    """
    _ = layout.bound
    check_kind(model)
    check_layout(layout, axis)
    if verify:
        transformers_verify.verify(model, layout, axis, embeddings)
    return install(model, layout, axis, embeddings)


def restore(model: nn.Module) -> nn.Module:
    """Undo `parallelize`: the model's own attention, loss and `generate`, and none of weft's hooks.

    Args:
        model: a parallelized model.

    Returns:
        The model.

    Raises:
        DeclarationError: a model that is not parallelized.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2)).eval()
    >>> restore(parallelize(model, Layout.single(), verify=False)) is model
    True
    """
    return uninstall(model)
