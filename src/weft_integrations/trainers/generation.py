"""TRL's trainers that generate, GRPO and RLOO, on context groups.

They draw completions, score them and normalise rewards over all ranks, in methods that are private
to TRL: a test holds their signatures.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from einops import repeat
from torch import Tensor

from weft._torch import one_dim
from weft.layout import Layout

from .accelerators import once_per_group
from .groups import ContextGroup
from .refused import refuse_setting

#: Private methods of TRL that are overridden, with their parameters.
SEAMS = {
    "_generate": ("self", "prompts"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_generate_and_score_completions": ("self", "inputs"),
}


def generates(cls: type) -> bool:
    """True if a class of trainers generates its training data."""
    return all(hasattr(cls, name) for name in SEAMS)


def with_generation(cls: type, layout: Layout, group: ContextGroup) -> type:
    """A class whose ranks of a context group train on the same completions and rewards.

    Completions and rewards are those of the group's first rank. A group of generations of one
    prompt stays within a rank, so that means and deviations count no copies.
    """

    ranks = _ranks(layout)

    class Generating(cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            from accelerate.utils import set_seed

            settings: Any = self.args
            # TRL counts a block of rows for every rank and would draw it again for each of a group.
            rows = settings.per_device_train_batch_size * settings.steps_per_generation
            settings.generation_batch_size = rows * group.count
            set_seed(settings.seed + group.index)  # TRL adds the rank

        def create_accelerator_and_postprocess(self) -> None:
            _check(self.args, group)
            super().create_accelerator_and_postprocess()

        def _generate(self, prompts: list) -> Any:
            seen = self.state.num_input_tokens_seen
            completions = super()._generate(prompts)
            of_all_ranks = self.state.num_input_tokens_seen - seen
            self.state.num_input_tokens_seen = seen + of_all_ranks // group.size
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
            return _of_the_first(completions, ranks)

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
            rewards = super()._calculate_rewards(*args, **kwargs)  # of all ranks
            self._rewards = once_per_group(group, rewards)
            sizes = {"g": group.count, "s": group.size}
            return repeat(self._rewards, "(g n) k -> (g s n) k", **sizes)

        def _generate_and_score_completions(self, inputs: list) -> Any:
            scored_inputs = super()._generate_and_score_completions(inputs)
            logged = self._metrics["train" if self.model.training else "eval"]
            scored = ~self._rewards.isnan()
            _count_once(logged["reward_std"], int(scored.any(1).sum()), group.size)
            for name, count in zip(self.reward_func_names, scored.sum(0).tolist()):
                _count_once(logged[f"rewards/{name}/std"], count, group.size)
            return scored_inputs

    return Generating


def _count_once(deviations: list[float], count: int, copies: int) -> None:
    """Make the last standard deviation, of `copies` of every number, that of the numbers."""
    if count > 1:
        deviations[-1] *= ((count * copies - 1) / (copies * (count - 1))) ** 0.5


def _ranks(layout: Layout) -> dist.ProcessGroup | None:
    """The process group of a context group; None: this process alone."""
    if not layout.mesh:
        return None
    dims = layout.device_dims(layout.mesh)
    assert layout.device_mesh is not None
    return one_dim(layout.device_mesh, dims, f"weft_{'_'.join(dims)}").get_group()


def _of_the_first(value: Any, ranks: dist.ProcessGroup | None) -> Any:
    """The object that the first rank of a group has."""
    if ranks is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=ranks, group_src=0)
    return box[0]


def _check(args: Any, group: ContextGroup) -> None:
    """Raise for settings whose statistics would count the copies of a completion."""
    if group.size == 1:
        return
    rows, generations = args.per_device_train_batch_size, args.num_generations
    per_rank = rows * args.steps_per_generation
    if per_rank % generations:
        refuse_setting(
            f"num_generations={generations} with {per_rank} completions on a rank "
            f"(per_device_train_batch_size={rows} x steps_per_generation="
            f"{args.steps_per_generation})",
            "generations of one prompt would be on ranks of a context group that hold the same "
            f"rows; make their number divide {per_rank}",
        )
    evaluated = getattr(args, "num_generations_eval", None) or generations
    if str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no" and (
        args.per_device_eval_batch_size % evaluated
    ):
        refuse_setting(
            f"num_generations_eval={evaluated} with "
            f"per_device_eval_batch_size={args.per_device_eval_batch_size}",
            "take a batch that holds all generations of a prompt",
        )
    for setting, wrong, instead in (
        ("scale_rewards", ("batch",), "'group' or 'none'"),
        ("multi_objective_aggregation", ("normalize_then_sum",), "'sum_then_normalize'"),
        ("normalize_advantages", (True,), "False"),
        ("use_vllm", (True,), "False: it was not tried"),
        ("use_transformers_continuous_batching", (True,), "False: it was not tried"),
        ("use_liger_kernel", (True,), "False"),
    ):
        if getattr(args, setting, None) in wrong:
            refuse_setting(f"{setting}={getattr(args, setting)!r}", f"set it to {instead}")
    if getattr(args, "top_entropy_quantile", 1.0) < 1.0:
        refuse_setting(
            f"top_entropy_quantile={args.top_entropy_quantile}",
            "a quantile over all ranks would count every token of a group several times",
        )


__all__ = ["SEAMS", "generates", "with_generation"]
