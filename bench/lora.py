"""Rounds of LoRA beside a bare PEFT loop: what the library costs where only adapters train.

    python bench/lora.py                 # GPT-2 of 3.3 million weights, 10 clients, two workers
    python bench/lora.py --width 64 --layers 2

FedAvg. The bare loop is what one would write with PEFT: one model for each thread, adapters copied
in, SGD on them in K steps, their change summed into the mean, one torch thread in each. Both train
the same batches, and must end with the same adapters to 1e-5. Passes take turns; medians are told.
Needs prefed[hf].
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

import prefed
from prefed.core import draws

CLIENTS, STEPS, BATCH, ROWS, LENGTH, LR = 10, 10, 8, 40, 64, 0.05


def make_model(width: int, layers: int) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", fan_in_fan_out=True
    )
    return peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)


def clients() -> list[tuple[dict[str, Tensor], Tensor]]:
    draw = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (CLIENTS, ROWS, LENGTH + 1), generator=draw)
    return [({"input_ids": c[:, :-1].contiguous()}, c[:, 1:].contiguous()) for c in codes]


class Bare:
    """A federated loop over PEFT's model, with threads."""

    def __init__(self, model: Any, workers: int) -> None:
        self.models = [copy.deepcopy(model) for _ in range(workers)]
        self.adapters = [[p for p in m.parameters() if p.requires_grad] for m in self.models]
        self.weights = [p.detach().clone() for p in self.adapters[0]]
        self.data, self.pool, self.number = clients(), ThreadPoolExecutor(workers), 0

    def round(self) -> None:
        workers = len(self.models)
        parts = [range(w, CLIENTS, workers) for w in range(workers)]
        sums = [*self.pool.map(self._train, range(workers), parts)]
        for i, weight in enumerate(self.weights):
            weight.add_(sum(total[i] for total in sums), alpha=1 / CLIENTS)
        self.number += 1

    def _train(self, worker: int, part: range) -> list[Tensor]:
        torch.set_num_threads(1)
        model, adapters = self.models[worker], self.adapters[worker]
        model.train()
        total = [torch.zeros_like(w) for w in self.weights]
        for client in part:
            with torch.no_grad():
                for p, w in zip(adapters, self.weights, strict=True):
                    p.copy_(w)
            x, y = self.data[client]
            batches = draws.batches(0, self.number, client, ROWS, STEPS * BATCH)
            for rows in torch.from_numpy(batches).reshape(STEPS, BATCH):
                logits = model(input_ids=x["input_ids"][rows]).logits
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), y[rows].flatten())
                gradients = torch.autograd.grad(loss, adapters)
                with torch.no_grad():
                    for p, g in zip(adapters, gradients, strict=True):
                        p.sub_(g, alpha=LR)
            with torch.no_grad():
                for t, p, w in zip(total, adapters, self.weights, strict=True):
                    t.add_(p).sub_(w)
        return total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=7)
    given = parser.parse_args()
    model = make_model(given.width, given.layers)
    settings = prefed.Settings(
        rounds=10_000, local_steps=STEPS, batch_size=BATCH, engine="sequential",
        workers=given.workers, device="cpu", weighting="uniform",
    )  # fmt: skip
    bare = Bare(model, given.workers)
    runs: dict[str, Any] = {"bare": bare}
    for algorithm in (prefed.FedAvg(client_lr=LR), prefed.PreFed(client_lr=1e-3)):
        run = prefed.Run(algorithm, model, prefed.FederatedData(clients()), settings)
        runs[type(algorithm).__name__] = run
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(given.passes + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run.round() if run is bare else run.run_round()
            times[name].append(time.perf_counter() - start)
    ours = runs["FedAvg"].server.weights
    theirs = torch.cat([w.reshape(-1) for w in bare.weights])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}
    everything = sum(p.numel() for p in model.parameters())
    print(f"{len(theirs)} of {everything} weights train, {given.workers} workers")
    for name, median in medians.items():
        print(f"{name:<8} {1e3 * median:7.1f} ms a round, {median / medians['bare']:.2f} of bare")


if __name__ == "__main__":
    main()
