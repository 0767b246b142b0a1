"""The same GPT-2 in PyTorch, with and without checkpointing of each layer: what bench/recompute.py is compared with.

    python bench/recompute_torch.py     # in an interpreter with PyTorch and transformers

The same batch size and length, AdamW, threads; each in a process of its own, whose peak of resident memory is counted from
what it has once the libraries are imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import median

BATCH, LENGTH, STEPS, WARM_UP, THREADS = 4, 256, 3, 1, 2


def resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def train(policy: str) -> None:
    """Print peak bytes and the times of the steps as JSON."""
    import make_models
    import torch

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    before = resident("VmRSS")
    model = make_models.gpt2(12).train()
    if policy == "layers":
        model.model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, labels = (torch.randint(0, 50257, (BATCH, LENGTH)) for _ in range(2))
    times = []
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x).flatten(0, -2), labels.flatten()).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    print(json.dumps({"peak": resident("VmHWM") - before, "times": times[WARM_UP:]}))


def main() -> None:
    for policy in ("none", "layers"):
        command = [sys.executable, __file__, policy]
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        print(f"gpt2_12l {policy:>7} {result['peak'] / 2**20:>6.0f} MiB {median(result['times']):>6.2f} s a step", flush=True)


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main()
