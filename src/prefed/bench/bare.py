"""Bare PyTorch loops: what somebody in a hurry would write for one FedAvg round, done well.

Parameters and gradients are views into two flat vectors (so that a step is one line), convolutions
are channels_last, and clients run on several cores at once: in threads, or in processes that hold
the data and wait for weights. On a GPU the samples lie in its memory, and threads have a stream
each. The best of them is what prefed is compared with.
"""

from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as processes
from torch import Tensor
from torch.nn.functional import cross_entropy

from prefed.bench.workloads import WORKLOADS, Workload
from prefed.core.flat_model import FlatModel
from prefed.data import Samples

LR = 0.05


class Client:
    """One model, and the loop over clients on it."""

    def __init__(self, work: Workload, device: str = "cpu") -> None:
        torch.manual_seed(0)
        model = work.model().to(device)
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
        self.work, self.flat, self.device = work, FlatModel(model), device
        self.samples: dict[int, Samples] = {}

    def train(self, weights: Tensor, clients: list[int]) -> Tensor:
        """The sum of the clients' weights after their local steps."""
        flat, total = self.flat, torch.zeros_like(weights)
        for client in clients:
            samples = self._samples(client)
            flat.weights.copy_(weights)
            for _ in range(self.work.local_steps):
                size = self.work.batch_size or len(samples)
                x, y = samples.take(torch.randint(len(samples), (size,), device=self.device))
                flat.gradient.zero_()
                cross_entropy(flat.module(x), y).backward()
                flat.weights.add_(flat.gradient, alpha=-LR)
            total.add_(flat.weights)
        return total

    def _samples(self, client: int) -> Samples:
        """Moved to a GPU once, and not in every round."""
        found = self.work.data.client(client)
        if self.device == "cpu":
            return found
        if client not in self.samples:
            self.samples[client] = Samples(*(values.to(self.device) for values in found.all()))
        return self.samples[client]


class Alone:
    """One client after another, each with all cores."""

    def __init__(self, work: Workload, device: str = "cpu") -> None:
        self.work, self.client = work, Client(work, device)
        self.weights = self.client.flat.weights.clone()

    def round(self) -> None:
        cohort = _cohort(self.work)
        self.weights = self.client.train(self.weights, cohort) / len(cohort)


class Threads:
    def __init__(self, work: Workload, threads: int, device: str = "cpu") -> None:
        self.work, self.clients = work, [Client(work, device) for _ in range(threads)]
        self.pool = ThreadPoolExecutor(threads, initializer=_begin, initargs=(device,))
        self.weights = self.clients[0].flat.weights.clone()

    def round(self) -> None:
        cohort = _cohort(self.work)
        shares = [cohort[i :: len(self.clients)] for i in range(len(self.clients))]
        synchronise(self.clients[0].device)  # streams know nothing of each other
        jobs = [
            self.pool.submit(client.train, self.weights, share)
            for client, share in zip(self.clients, shares, strict=True)
        ]
        wait(jobs)
        synchronise(self.clients[0].device)
        self.weights = sum((job.result() for job in jobs), torch.zeros(())) / len(cohort)

    def close(self) -> None:
        self.pool.shutdown()


class Processes:
    """The first process works too; the others share the weights' memory with it."""

    def __init__(self, name: str, work: Workload, count: int) -> None:
        self.work, self.own = work, Client(work)
        self.weights = self.own.flat.weights.clone().share_memory_()
        context = processes.get_context("spawn")
        self.others: list[tuple[Any, Connection, Tensor]] = []
        for _ in range(count - 1):
            here, there = context.Pipe()
            total = torch.zeros_like(self.weights).share_memory_()
            process = context.Process(
                target=_serve, args=(name, there, self.weights, total), daemon=True
            )
            process.start()
            here.recv()
            self.others.append((process, here, total))

    def round(self) -> None:
        cohort, count = _cohort(self.work), len(self.others) + 1
        for i, (_, pipe, _) in enumerate(self.others):
            pipe.send(cohort[i + 1 :: count])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        mean = self.own.train(self.weights, cohort[::count])
        torch.set_num_threads(threads)
        for _, pipe, total in self.others:
            pipe.recv()
            mean.add_(total)
        self.weights.copy_(mean.div_(len(cohort)))

    def close(self) -> None:
        for process, pipe, _ in self.others:
            pipe.send(None)
            process.join()


def synchronise(device: str) -> None:
    """Wait for all that a GPU has been told to do."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def _begin(device: str) -> None:
    """A thread computes on one core, and on a stream of its own."""
    torch.set_num_threads(1)
    if torch.device(device).type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())


def _serve(name: str, pipe: Connection, weights: Tensor, total: Tensor) -> None:
    torch.set_num_threads(1)
    client = Client(WORKLOADS[name]())
    pipe.send("ready")
    while (clients := pipe.recv()) is not None:
        total.copy_(client.train(weights, clients))
        pipe.send("done")


def _cohort(work: Workload) -> list[int]:
    return torch.randperm(len(work.data))[: work.clients_per_round].tolist()
