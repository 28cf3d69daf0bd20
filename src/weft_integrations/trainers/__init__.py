"""Trainers of other libraries on a model whose sequences are split over ranks.

transformers' `Trainer`, TRL's trainers, accelerate and Lightning Fabric average gradients over all
ranks and give every rank other rows. A model that takes full rows on every rank of a context
group, `parallelize(model, layout)`, has gradients whose mean over ranks is the true
one. The loader must then give the ranks of a group the same rows:

    layout = trainers.layout("tokens: ring=2")                      # the other ranks are replicas
    trainer = trainers.of(SFTTrainer, layout)(model=..., args=..., train_dataset=...)

`of` is for classes of `Trainer`; `attach(accelerator, layout)` for a loop around accelerate;
`sampler(dataset, layout)` for Fabric and for any other `DataLoader`.
"""

from .accelerators import attach
from .groups import layout, sampler
from .subclass import of

__all__ = ["attach", "layout", "of", "sampler"]
