"""LoRA adapters over federated clients, one for each speaker of a play.

    python examples/lora.py                                # a small random GPT-2, a few lines
    python examples/lora.py --data ../shared/data/shakespeare.txt --rounds 20
    python examples/lora.py --checkpoint distilgpt2 --data ../shared/data/shakespeare.txt

The first two need no network: the model is small and random, and its tokens are bytes. The third
fetches a real checkpoint and its tokeniser; nothing else differs. Needs prefed[hf].

--freeze-a trains B alone (FFA-LoRA): half the upload, and the mean of the clients' products B A is
exact. --save writes the adapters as PEFT does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

import prefed
from prefed.data.shakespeare import speeches

LINES = """HAMLET:
To be, or not to be, that is the question:
Whether 'tis nobler in the mind to suffer
The slings and arrows of outrageous fortune,
Or to take arms against a sea of troubles.

MACBETH:
To-morrow, and to-morrow, and to-morrow,
Creeps in this petty pace from day to day,
To the last syllable of recorded time.

JULIET:
O Romeo, Romeo, wherefore art thou Romeo?
Deny thy father and refuse thy name,
Or if thou wilt not, be but sworn my love.

HENRY:
Once more unto the breach, dear friends, once more,
Or close the wall up with our English dead.
In peace there's nothing so becomes a man
As modest stillness and humility.
"""

Tokens = Callable[[str], list[int]]


def model_and_tokens(checkpoint: str | None, length: int) -> tuple[Any, Tokens]:
    if checkpoint is not None:
        tokeniser = transformers.AutoTokenizer.from_pretrained(checkpoint)
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        return model, lambda text: [*tokeniser(text)["input_ids"]]
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=length, n_embd=64, n_layer=2, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), lambda text: [*text.encode()]


def federated(text: str, tokens: Tokens, length: int) -> prefed.FederatedData:
    """Each speaker's words in rows of at most `length` tokens; y is the token after each. A fifth
    of a client's rows is held out."""
    clients = []
    for said in speeches(text).values():
        codes = tokens("\n".join(said))
        rows = [torch.tensor(codes[i : i + length + 1]) for i in range(0, len(codes) - 1, length)]
        x = {
            "input_ids": [row[:-1] for row in rows],
            "attention_mask": [torch.ones_like(row[:-1]) for row in rows],
        }
        if len(rows) > 1:
            clients.append((x, [row[1:] for row in rows]))
    return prefed.FederatedData(clients, pad=0).hold_out(0.2)


def main(arguments: list[str] | None = None) -> prefed.Result:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a play; a few lines if it is not given")
    parser.add_argument("--checkpoint", help="a causal language model of Hugging Face")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=32, help="tokens in a row")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--freeze-a", action="store_true")
    parser.add_argument("--save", type=Path, help="a directory for the adapters")
    given = parser.parse_args(arguments)

    model, tokens = model_and_tokens(given.checkpoint, given.length)
    data = federated(given.data.read_text() if given.data else LINES, tokens, given.length)
    torch.manual_seed(1)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=given.rank,
        lora_alpha=2 * given.rank,
        target_modules="all-linear",
        fan_in_fan_out=model.config.model_type == "gpt2",  # whose layers have weights (in, out)
    )
    model = peft.get_peft_model(model, lora)

    algorithm = prefed.PreFed(
        client_lr=prefed.schedule.warmup(0.003, steps=20, local_steps=10),
        tau=1e-6,
        freeze=["*lora_A*"] if given.freeze_a else [],
    )
    result = prefed.simulate(
        algorithm,
        model,
        data,
        rounds=given.rounds,
        clients_per_round=min(10, len(data)),
        local_steps=10,
        batch_size=8,
        micro_batch=4,
        evaluate_clients=min(50, len(data)),
    )
    first, last = result.history[0], result.history[-1]
    everything = sum(p.numel() for p in model.parameters())
    print(f"{len(data)} clients; {len(result.weights)} of {everything} weights train and travel")
    print(f"{last['bytes_up'] / len(last['cohort']) / 1e3:.1f} kB up for a client and round")
    print(
        f"clients' own loss: {first['client_loss_mean']:.3f}, then {last['client_loss_mean']:.3f}"
    )
    if given.save is not None:
        result.model.save_pretrained(given.save)
        print(f"{given.save}: PeftModel.from_pretrained(base, ...) reads it")
    return result


if __name__ == "__main__":
    main()
