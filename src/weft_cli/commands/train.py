"""`weft train`: a model file on a layout file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.models import OptionInfo

from weft.declare import catalog
from weft.errors import DeclarationError, WeftError
from weft.launch import launcher as launch
from weft.launch import trace
from weft.launch.environment import already_launched, ranks_here
from weft.layout import Layout
from weft_models.declare.model_file import ModelSpec
from weft_models.declare.run_file import WEIGHTS, RunSpec, changed, layout_for

from ..inspect.printer import console
from . import options

MODELS = "the model file's"
#: What follows the training of a table model.
OF_TABLES = (
    "A short run shows that training works; the weights that ship saw 38,400 tables.\n"
    "[bold]weft.TabularClassifier(checkpoint=...)[/] predicts a table of yours with them."
)


def _of_training(
    label: str, default: str | bool = True, param_decls: Sequence[str] = (), **options: Any
) -> OptionInfo:
    options |= {"help": label, "show_default": default, "rich_help_panel": "Training"}
    return typer.Option(*param_decls, **options)


def _of_files(label: str, default: str, **extra: Any) -> OptionInfo:
    return typer.Option(help=label, show_default=default, rich_help_panel=options.FILES, **extra)


def train(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Name of a shipped model (see `weft list models`), or a path to a .toml.",
            show_default="the run file's",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Argument(
            metavar="[LAYOUT]",
            help="Name of a shipped layout (see `weft list layouts`), a path to a .toml, or a "
            "layout on one line such as 'tokens: ring=2'.",
            show_default="the run file's, else one device",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        _of_training("A run file, such as the run.toml of an earlier run.", False),
    ] = None,
    settings: Annotated[
        list[str] | None,
        _of_training(
            "Another value of a key of the run file or of the model's \\[train], such as "
            "warmup=0.05 or length.rows=[64,256]; may be repeated.",
            False,
            param_decls=["--set"],
            metavar="KEY=VALUE",
        ),
    ] = None,
    steps: Annotated[int | None, _of_training("Length of the run.", MODELS, min=1)] = None,
    batch: Annotated[
        int | None, _of_training("Examples per step, over all ranks.", MODELS, min=1)
    ] = None,
    seed: Annotated[
        int | None, _of_training("Of weights and data.", "0", min=0, max=options.MOST_SEED)
    ] = None,
    dtype: Annotated[str | None, _of_training("Of parameters and computation.", "float32")] = None,
    nproc: options.Nproc = None,
    device: options.Device = "auto",
    timeout: options.Timeout = None,
    restarts: Annotated[
        int, options.of_run("How often to start again, from the last checkpoint.", min=0)
    ] = 0,
    elastic: Annotated[
        str | None,
        options.of_run(
            "Numbers of ranks with which the run goes on after some died, each with a layout that "
            "fits it; under torchrun those of its --nnodes.",
            metavar="MIN:MAX",
            show_default="as many as it began with",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        _of_files("The run's folder: run.toml, curves, weights.", "runs/MODEL-LAYOUT"),
    ] = None,
    checkpoint_dir: Annotated[Path | None, _of_files("Checkpoints.", "none are written")] = None,
    checkpoint_every: Annotated[
        int | None, _of_files("Steps between checkpoints.", "only the last step", min=1)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the latest checkpoint in --checkpoint-dir, written on any layout.",
            show_default=False,
            rich_help_panel=options.FILES,
        ),
    ] = False,
) -> None:
    r"""Train a model on a layout.

    Starts the ranks itself. The same seed gives the same loss curve on every
    layout. The run's folder gets `run.toml`, the settings of the run, with
    which `--config` does it again; TensorBoard's curves (the terminal shows
    running means); and the weights, `model.safetensors`, which
    `weft.TabularClassifier(checkpoint=...)` takes where the model is one of tables.

    Examples:

        weft train tabular tabular-2x2

        weft train causal_lm head-x-ring --steps 100 --set accumulate=4 --set gradients=fsdp

        weft train --config runs/tabular-tabular-2x2/run.toml --set lr=1e-3 --log-dir runs/b

        weft train tabular tabular-2x2 --checkpoint-dir runs/a --resume

        weft train tabular tabular-2x2 --checkpoint-dir runs/a --checkpoint-every 50 --restarts 3

        weft train causal_lm 'tokens: ring=-1' --elastic 2:4 --restarts 3 --checkpoint-dir runs/a
        --checkpoint-every 50

        torchrun --nproc-per-node 4 -m weft train tabular tabular-2x2
    """
    typed = {"model": model, "layout": layout, "seed": seed, "dtype": dtype}
    typed_train = {"steps": steps, "batch": batch, "checkpoint_every": checkpoint_every}
    run = _run_file(config, settings or [], typed, typed_train)
    spec = run.spec()
    sizes, ranks = _sizes(elastic, nproc, run.layouts)
    if elastic is not None:
        _refuse_sizes(spec, run.layouts, sizes, checkpoint_dir, run.train, restarts)
    chosen = (
        options.layout_named(layout_for(run.layouts, ranks)) if run.layouts else Layout.single()
    )
    if run.train.get("checkpoint_every") and checkpoint_dir is None:
        raise typer.BadParameter("--checkpoint-every needs --checkpoint-dir, the folder for them")
    _refuse_early(spec, resume, checkpoint_dir)
    first = options.layout_named(run.layouts[0]).name if run.layouts else "one-device"
    where = re.sub(r"[^\w.=-]+", "-", first)
    if log_dir is None:
        log_dir = Path("runs") / f"{spec.name}-{where}"
        if log_dir.is_symlink():
            raise DeclarationError(
                f"{log_dir} is a link, and a name that weft made up, so it is not followed; remove"
                " it, or name a folder yourself: --log-dir FOLDER"
            )
    given = {
        "seed": run.seed,
        "dtype": options.dtype_named(run.dtype),
        "run_file": run.resolved().to_toml(),
        "log_dir": log_dir,
        "checkpoint_dir": checkpoint_dir,
        "resume": resume,
    }
    place = options.device_for(device, ranks)
    _announce(spec, chosen, ranks, place, log_dir)
    job = (spec, run.layouts, place, timeout, given)
    seconds = launch.run(
        _rank, *job, ranks=ranks, restarts=restarts, on_restart=_print, fewest=sizes[0]
    )
    if seconds is not None:
        console().print(
            f"trained in {seconds:.0f} s; weights in {log_dir / WEIGHTS}", highlight=False
        )
        if spec.head == "table":
            console().print(OF_TABLES, highlight=False, soft_wrap=True)


def _run_file(
    config: Path | None, settings: list[str], typed: dict[str, Any], train: dict[str, Any]
) -> RunSpec:
    """The run file, then `--set`, then the options of the command; later ones win."""
    data = {} if config is None else catalog.parse(config)
    if config is None and typed["model"] is None:
        raise typer.BadParameter("name a MODEL, or give --config with a run file")
    data = changed(data, settings)
    data |= {key: value for key, value in typed.items() if value is not None}
    data["train"] |= {key: value for key, value in train.items() if value is not None}
    return RunSpec.from_dict(data, "run" if config is None else str(config))


def _refuse_early(spec: ModelSpec, resume: bool, checkpoint_dir: Path | None) -> None:
    """Raise early for errors that would only show at the end, or on every rank."""
    from weft_models.train.data import check_trains

    check_trains(spec)
    if resume and checkpoint_dir is None:
        raise typer.BadParameter("--resume needs --checkpoint-dir, the folder to resume from")


def _announce(spec: ModelSpec, layout: Layout, ranks: int, place: str, log_dir: Path) -> None:
    started = already_launched()
    if started is None or started.rank == 0:
        threads = launch.threads_per_rank(ranks_here(ranks))
        console().print(
            f"[bold]{spec.name}[/] on [bold]{escape(layout.name)}[/]: {ranks} ranks on {place}, "
            f"{threads} threads each; curves in {log_dir}",
            highlight=False,
        )
        if ranks > 1:
            console().print(
                f"The loss is that of one process, to rounding: [bold]weft train {spec.name}[/]"
                " draws the same curve.",
                highlight=False,
            )


def _print(text: str) -> None:
    console().print(escape(text), highlight=False, soft_wrap=True)


def _sizes(elastic: str | None, nproc: int | None, layouts: Sequence[str]) -> tuple[range, int]:
    """Numbers of ranks that the run may have, and that which it has now."""
    started = already_launched()
    if elastic is None:
        if len(layouts) > 1 and (started is not None or nproc is not None):
            ranks = nproc if started is None else started.world_size
        else:
            chosen = options.layout_named(layouts[0]) if layouts else Layout.single()
            ranks = options.ranks_of(chosen, nproc)
        assert ranks is not None
        return range(ranks, ranks + 1), ranks
    low, _, high = elastic.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
        raise typer.BadParameter(
            f"--elastic {elastic!r}: write MIN:MAX, two numbers of ranks, such as 2:4"
        )
    sizes = range(int(low), int(high) + 1)
    if nproc is not None:
        raise typer.BadParameter("--nproc beside --elastic, which says how many ranks there are")
    if started is None:
        return sizes, sizes[-1]
    if started.world_size not in sizes:
        raise WeftError(
            f"--elastic {elastic}, but {started.launcher} started {started.world_size} ranks; give "
            "the numbers that it may start"
        )
    return sizes, started.world_size


def _refuse_sizes(
    spec: ModelSpec,
    layouts: Sequence[str],
    sizes: range,
    checkpoint_dir: Path | None,
    train: Mapping[str, Any],
    restarts: int,
) -> None:
    """Raise unless the run could go on with every number of ranks."""
    from weft_models.models.composer import check_fit
    from weft_models.train.data import check_batch

    if checkpoint_dir is None or not train.get("checkpoint_every"):
        raise typer.BadParameter(
            "--elastic needs --checkpoint-dir and --checkpoint-every: a run goes on with other "
            "ranks from a checkpoint"
        )
    if already_launched() is None and not restarts:
        raise typer.BadParameter("--elastic needs --restarts, how often to start again")
    if not layouts:
        raise typer.BadParameter("--elastic needs a LAYOUT, such as 'tokens: ring=-1'")
    wrong = []
    for ranks in sizes:
        try:
            layout = options.layout_named(layout_for(layouts, ranks)).resolve(ranks)
            check_fit(spec, layout)
            check_batch(spec, layout)
        except WeftError as error:
            wrong.append(f"{ranks} ranks: {error}")
    if wrong:
        raise DeclarationError(
            f"--elastic {sizes[0]}:{sizes[-1]} allows numbers of ranks with which the run could not"
            f" go on. {'. '.join(wrong)}. Give other layouts, in [elastic] of a run file one for"
            " each number of ranks, or other numbers"
        )


def _rank(
    spec: ModelSpec, layouts: Sequence[str], device: str, timeout: float | None, given: dict
) -> float:
    """One rank of `weft train`; returns the seconds it took."""
    from weft_models.train import fit as run

    place = already_launched()
    ranks = 1 if place is None else place.world_size
    chosen = options.layout_named(layout_for(layouts, ranks)) if layouts else Layout.single()
    trace.write_to(given["log_dir"])
    bound = chosen.build(device, timeout=timeout)
    return run(spec, bound, device=device, **given).seconds
