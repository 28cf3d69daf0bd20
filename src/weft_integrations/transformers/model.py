"""Hugging Face transformers on a layout by `weft.parallelize`; the model is unmodified.

transformers lets anyone register an attention function and the function that makes its masks;
`interface` has weft's, and `hooks` installs them. Computations over all tokens are in `whole`.
Arguments that weft cannot honour are refused by name, on every rank, and `verification` compares
the model on ranks with the model on one device.

Activations are (batch, tokens, embed), and every rank holds its own tokens. `rows` cuts full rows
on the way in and makes full rows on the way out. A `Batch` holds the facts that a shard lacks: the
global length, packed documents, padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout

from . import refused
from .hooks import check_kind, check_layout, install, without_adapters
from .latents import Latents
from .replicated import unshare_configurations
from .rows import check_context_group
from .stacks import stacks_of
from .verification import verify as verification

__all__ = ["parallelize_transformers"]

Rows = Literal["whole", "local"]
Images = Literal["whole", "spread"]


def parallelize_transformers(
    model: nn.Module,
    layout: Layout,
    axis: str = "tokens",
    embeddings: nn.Module | None = None,
    verify: bool | Mapping[str, Any] = True,
    rows: Rows = "whole",
    images: Images = "whole",
    latents: Latents = "auto",
) -> nn.Module:
    """Make a transformers model run sequence-parallel on a layout; returns the model.

    The model is checked first: on a short random input it runs whole and on virtual ranks, and a
    difference beyond rounding is refused. Behaviour that needs more tokens or other values is not
    seen (see `verify`).

    **Full rows** (`rows="whole"`). Every rank of the context group, the ranks that split the
    tokens, passes the same rows whole, as to a model on one device, and gets full rows back:

        out = model(input_ids=ids, labels=labels)     (b, n), the same on every rank of the group
        out.loss, out.logits                          of the full rows, the same on every rank
        loss.backward()                               gradients to be *averaged* over ranks

    A rank computes its n/P tokens. Losses may be made of the outputs as on one device; every rank
    makes the same. Backward multiplies by P, so that the average over ranks is the gradient of one
    device, and ranks of a context group are data-parallel ranks that hold the same rows: torch's
    `DistributedDataParallel` and `fully_shard` over all ranks, accelerate and clipping after
    backward are right as they are, and so are `weft.data_parallel(model, layout)` and
    `layout.sync_gradients(model)`. Documents (`cu_seq_lens_q`, or position ids that start anew),
    padding on either side, `shift_labels` and `num_items_in_batch` mean the same as in
    transformers. Ranks compare digests of the rows, of a few weights and of the gradients that
    enter the outputs: other rows, weights that nobody averages and losses that differ are an error
    on every rank, in that call or backward pass.

    `model.generate` is transformers' own, with a `ShardedCache` of which every rank holds a part:
    prompts are split over ranks, and then every rank computes every new token, attends to its own
    keys, and gets the same tokens as one device. A call with `cache=ShardedCache(model)`
    runs likewise.

    A call that has no parts runs *replicated*, with a warning: the model's attention as it was, on
    full rows, on every rank. So do calls with another cache (prefix tuning), with
    `output_attentions`, with fewer tokens than ranks, and of a part by itself
    (`get_image_features`).

    Of an encoder with a decoder both are split, by rows of their own; an encoder of sound stays
    whole. Their caches have no parts, so `generate` of these runs replicated.

    In a call with images, video or sound, what stands in front of the text decoder sees full rows
    on every rank, and the decoder's rows are split. An argument of the decoder whose shape does not
    say of which tokens it is is refused by name.

    A training call draws one number from torch's generator and seeds each rank's chunk by it, so
    that chunks drop and add noise otherwise, while generators of the group stay the same.

    **Local rows** (`rows="local"`), for a loop of yours whose loader reads a rank's share only:
    `model(**shard_batch(batch, layout))` gives this rank's shard of the outputs, and the loss over
    all ranks' tokens, whose gradients are *summed* over ranks in one of three ways:

        layout.sync_gradients(model)                  after backward
        weft.data_parallel(model, layout, "fsdp")       during backward: weights are sharded too
        weft.data_parallel(model, layout, "ddp")        during backward

    DDP and FSDP as torch makes them average instead, so calls with gradients are refused there.

    The loss is made over all ranks where the model's own is the cross-entropy of the next token, of
    masked tokens or of tokens' classes, and its routers' loss is added. Another loss of tokens is
    refused for local rows, and a call with it runs replicated for whole ones; a loss that a model
    adds by itself is refused. Where no token of any rank has a label the loss is NaN, as the
    model's is.

    Dropout within attention is refused, and so are whole layers or paths that are dropped at random
    (`layerdrop`, `drop_path_rate`), which every rank would draw otherwise. With local rows, dropout
    elsewhere draws from the rank's own generator: once the weights are made, give every rank that
    holds other tokens another seed, `torch.manual_seed(seed + layout.rank)`.

    Pooled outputs (`pooler_output`, the logits of a sequence or image classification head) and
    router logits come whole to every rank with either kind of rows.

    Compile the layers, `layer.compile(fullgraph=True)`, without `fullgraph` where a layer carries a
    state, which is no part of a graph. Compiled as a whole, the model is in several graphs: its
    hooks, which ask the other ranks, are no part of any.
    A graph belongs to one mask: packed documents of other lengths, and chunks of another uneven
    length, are compiled anew.

    Args:
        model: a transformers model that takes its attention from the attention interface, or a
            model of PEFT around one. Wrap it by DDP or FSDP afterwards.
        layout: a built layout that splits no heads. With whole rows it is the layout of a context
            group alone: bind it to a slice of the mesh, and leave data parallelism to DDP or FSDP.
        axis: the layout's name for the tokens.
        embeddings: for models that make their tokens from something else (a ViT): the submodule
            whose output (batch, tokens, embed) is whole on every rank and is to be split. Found by
            itself where the model has one submodule named `embeddings`.
        verify: check the model now; or a call of your own to check it by, whole, as a processor
            makes it of images and text. Without it a model may compute something else on ranks.
        rows: "whole" or "local".
        images: "whole": every rank runs towers on all images. "spread": each on some of them, in
            training and evaluation, balanced by patches squared; features go to the ranks of their
            tokens, and the outputs named image_... and video_... are not there. For families whose
            towers see one image at a time.
        latents: of multi-head latent attention (DeepSeek's and others'): "auto", where latents
            travel instead of expanded keys if they are fewer bytes and the call takes at most 5 %
            longer by the plan, which counts that every rank expands what arrives; "latents",
            always; or "keys", never.

    Raises:
        UnsupportedError: a model outside of transformers' attention interface, or one that is
            another model on ranks; AdaLoRA. In calls: dropout in attention or of layers, a loss
            that the model adds by itself, biases, another attention implementation set since,
            a transform of `torch.func`, gradients through a `ShardedCache`; in `generate` static,
            quantised and paged caches, and layers whose cache has no parts; with full rows a batch
            of `shard_batch`, with local ones an encoder with a decoder, a call without it, caches,
            attention weights, cross-attention, losses that weft does not make, masks given as
            tensors, `logits_to_keep`, torch's own DDP or FSDP2.
        DeclarationError: a model that is parallelized already, or whose weights are not there; a
            layout without the axis, that splits heads, or whose keys are split otherwise than its
            queries; full rows on a layout that splits something else than the tokens.
        ShapeError: on every rank, in a call with full rows or its backward pass: rows, weights or
            the gradients that entered the outputs differ within the context group.

    Example::

        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "ring"))
        layout = weft.Layout.parse("tokens: ring=2").bind(mesh["ring"])
        model = DistributedDataParallel(weft.parallelize(model, layout))  # averages over all four
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in batches(mesh["dp"].get_local_rank()):               # the same along "ring"
            model(input_ids=rows, labels=rows).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2)).eval()
    >>> layout = Layout.single()
    >>> _ = parallelize_transformers(model, layout)
    >>> ids = torch.arange(6)[None]
    >>> out = model(input_ids=ids, labels=ids)
    >>> out.logits.shape, out.loss.shape
    (torch.Size([1, 6, 10]), torch.Size([]))
    """
    _ = layout.bound
    inner = without_adapters(model)
    check_kind(inner)
    check_layout(layout, axis)
    refused.lists_of_keys(inner, layout, axis)
    if rows not in ("whole", "local"):
        raise DeclarationError(f"rows={rows!r}: known are 'whole' and 'local'")
    if images not in ("whole", "spread") or (images == "spread" and rows != "whole"):
        raise DeclarationError(f"images={images!r}: known are 'whole', and 'spread' of full rows")
    if latents not in ("auto", "latents", "keys"):
        raise DeclarationError(f"latents={latents!r}: known are 'auto', 'latents' and 'keys'")
    if rows == "whole":
        check_context_group(layout, axis)
    elif stacks_of(inner) is not None:
        raise UnsupportedError(
            f"{type(inner).__name__} has an encoder and a decoder, each with rows of its own, and"
            " rows='local' is of one; parallelize with rows='whole', and pass full rows"
        )
    if verify:
        batch = verify if isinstance(verify, Mapping) else None
        verification.verify(inner, layout, axis, embeddings, batch, latents, images)
    unshare_configurations(model)
    install(inner, layout, axis, embeddings, rows=rows, travel=latents, images=images)
    return model
