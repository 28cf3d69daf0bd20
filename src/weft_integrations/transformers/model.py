"""Hugging Face transformers on a layout by `weft.parallelize`; the model is unmodified.

Rows become fields (`weft.Field`): tensors with their global shape, of which every rank holds its
tokens, and for whose functions weft has rules. transformers lets anyone register an attention
function and the function that makes its masks; `interface` has weft's, and `hooks` installs them.
What carries a state along tokens, chooses keys or expands latents takes this rank's chunk and says
what travels. Nothing is verified by running, because nothing is assumed.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from weft.errors import DeclarationError
from weft.layout import Layout
from weft_axes.fields import WholeReport

from ..common import check_splits_only, within_adapters
from . import refused
from .hooks import check_kind, check_layout, install
from .latents import Latents
from .replicated import unshare_configurations

__all__ = ["parallelize_transformers"]

Images = Literal["whole", "spread"]


def parallelize_transformers(
    model: nn.Module,
    layout: Layout,
    axis: str = "tokens",
    embeddings: nn.Module | None = None,
    images: Images = "whole",
    latents: Latents = "auto",
    fallback: Literal["whole", "refuse"] = "whole",
) -> nn.Module:
    """Make a transformers model run sequence-parallel on a layout; returns the model.

    Every rank of the context group, the ranks that split the tokens, passes the same rows whole,
    as to a model on one device:

        out = model(input_ids=ids, labels=labels)     (b, n), the same on every rank of the group
        out.loss                                      of the full rows, the same on every rank
        out.logits                                    `weft.Field`: the full rows' shape, a rank's
                                                      tokens; `out.logits.full_tensor()` is whole
        loss.backward()                               gradients to be *averaged* over ranks

    A rank computes its n/P tokens. Losses of yours may be made of outputs as on one device: what
    has parts is a field, on which functions of torch give what they give on whole tensors; the
    rest is a plain tensor. Every rank makes the same loss. Backward multiplies by P, so that the
    average over ranks is the gradient of one device, and ranks of a context group are
    data-parallel ranks that hold the same rows: torch's `DistributedDataParallel` and
    `fully_shard` over all ranks, accelerate and clipping after backward are right as they are,
    and so are `weft.data_parallel(model, layout)` and `layout.sync_gradients(model)`.
    Documents (`cu_seq_lens_q`, or position ids that start anew), padding on either side,
    `shift_labels` and `num_items_in_batch` mean the same as in transformers. Ranks compare digests
    of the rows, of weights and of functions where they exchange: other rows, weights that nobody
    averages and other code are an error on every rank.

    A function of torch without a rule for what is split runs whole on every rank, exactly, and is
    named in a warning, once; `model._weft.ran_whole` counts them. Random numbers in training are
    those of one device: give all ranks of a context group one seed.

    `model.generate` is transformers' own, with a `ShardedCache` of which every rank holds a part:
    prompts are split over ranks, and then every rank computes every new token, attends to its own
    keys, and gets the same tokens as one device. A call with `cache=ShardedCache(model)`
    runs likewise.

    A call that has no parts runs *replicated*, with a warning: the model's attention as it was, on
    full rows, on every rank. So do calls with another cache (prefix tuning), with
    `output_attentions`, with fewer tokens than ranks, and of a part by itself
    (`get_image_features`).

    Of an encoder with a decoder both are split; an encoder of sound stays whole. Their caches have
    no parts, so `generate` of these runs replicated. In a call with images, video or sound, what
    stands in front of the text decoder sees full rows on every rank.

    Of a compiled model, or of compiled layers, modules whose code proves that they treat tokens one
    by one are graphs; the rest runs as it is, and a line of the log says so.

    Args:
        model: a transformers model that takes its attention from the attention interface, or a
            model of PEFT around one. Wrap it by DDP or FSDP afterwards.
        layout: a built layout of a context group alone: it splits the tokens, and nothing else.
            Bind it to a slice of the mesh, and leave data parallelism to DDP or FSDP.
        axis: the layout's name for the tokens.
        embeddings: for models that make their tokens from something else (a ViT): the submodule
            whose output (batch, tokens, embed) is whole on every rank and is to be split. Found by
            itself where the model has one submodule named `embeddings`.
        images: "whole": every rank runs towers on all images. "spread": each on some of them, in
            training and evaluation, balanced by patches squared; features go to the ranks of their
            tokens, and the outputs named image_... and video_... are not there. For families whose
            towers see one image at a time.
        latents: of multi-head latent attention (DeepSeek's and others'): "auto", where latents
            travel instead of expanded keys if they are fewer bytes and the call takes at most 5 %
            longer by the plan, which counts that every rank expands what arrives; "latents",
            always; or "keys", never.
        fallback: "refuse" refuses functions without a rule, by name, on every rank.

    Raises:
        UnsupportedError: a model outside of transformers' attention interface; AdaLoRA. In calls:
            dropout in attention, another attention implementation set since, a transform of
            `torch.func`, gradients through a `ShardedCache`; in `generate` static, quantised and
            paged caches, and layers whose cache has no parts.
        DeclarationError: a model that is parallelized already, or whose weights are not there; a
            layout without the axis, that splits heads or something else than the tokens, or whose
            keys are split otherwise than its queries.
        ShapeError: on every rank, in a call or its backward pass: rows, weights or the gradients
            that entered the outputs differ within the context group.

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
    inner = within_adapters(model)
    refused.adalora(inner)
    check_kind(inner)
    check_layout(layout, axis)
    check_splits_only(layout, axis, "tokens")
    refused.lists_of_keys(inner, layout, axis)
    for option, value, known in (
        ("images", images, ("whole", "spread")),
        ("latents", latents, ("auto", "latents", "keys")),
        ("fallback", fallback, ("whole", "refuse")),
    ):
        if value not in known:
            raise DeclarationError(f"{option}={value!r}: known are {', '.join(map(repr, known))}")
    unshare_configurations(model)
    report = WholeReport() if fallback == "whole" else None
    install(inner, layout, axis, embeddings, travel=latents, images=images, report=report)
    return model
