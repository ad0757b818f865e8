"""How a run goes: everything about it that is not the algorithm, the model or the data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: PositiveInt
    clients_per_round: PositiveInt | None = None
    """None is everyone; a config says "all" or nothing."""
    local_steps: PositiveInt
    batch_size: PositiveInt | None = 32
    """None is the full batch; a config says "full"."""
    batches: Literal["replacement", "epochs"] = "replacement"
    """Drawn with replacement in each step, as in the paper; or shuffled passes over the samples."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    weighting: Literal["uniform", "samples"] = "uniform"
    engine: str = "auto"
    workers: PositiveInt = 1
    device: str = "auto"
    """auto, cpu, cuda (or cuda:1, ...) or mps."""
    channels_last: bool = False
    """The memory format that convolutions on GPUs are fastest in."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 is mixed precision: matrix products and convolutions in bfloat16, the weights and
    all state as they are."""
    evaluate_every: PositiveInt = 1
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The chance of each client of a cohort never to answer."""
    quorum: PositiveInt = 1
    """A round with fewer answers leaves the model as it was."""
    on_divergence: Literal["stop", "continue"] = "stop"
    """When an update is not finite: stop the run, or leave its client out of the round."""

    @field_validator("clients_per_round", "batch_size", mode="before")
    @classmethod
    def _from_word(cls, value: Any) -> Any:
        return None if value in ("all", "full") else value

    def weight(self, samples: int) -> float:
        """The weight of a client with so many samples in every mean over the cohort."""
        return 1.0 if self.weighting == "uniform" else float(samples)
