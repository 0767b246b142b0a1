"""Files of weights as PyTorch writes them, for the model ``models/mlp_dropout.legacy_train.onnx``.

    pip install torch safetensors && python make_weights.py

``weights/values.npz`` holds the numbers, in float32, by the names of the state_dict. The files:

* ``state.pt``, ``state.safetensors``: the state_dict
* ``run.pt``: what a training script saves: the epoch, the state_dict of a DataParallel module, and an optimizer's
* ``half.pt``: the state_dict in bfloat16
* ``views.pt``: tensors that share a storage, one of them transposed in memory
* ``legacy.pt``: the format of PyTorch before 1.6, ``module.pt``: a pickled module, ``script.pt``: a TorchScript module
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "weights"


class Net(torch.nn.Module):
    """The names and shapes of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(12, 32)
        self.fc2 = torch.nn.Linear(32, 16)
        self.fc3 = torch.nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    torch.manual_seed(11)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 12)).square().mean().backward()
    optimizer.step()
    state = {name: value.detach().clone() for name, value in net.state_dict().items()}
    np.savez_compressed(FOLDER / "values.npz", **{name: value.numpy() for name, value in state.items()})
    torch.save(net.state_dict(), FOLDER / "state.pt")
    save_file(state, FOLDER / "state.safetensors")
    parallel = {f"module.{name}": value for name, value in state.items()}
    torch.save({"epoch": 3, "model": parallel, "optimizer": optimizer.state_dict()}, FOLDER / "run.pt")
    torch.save({name: value.bfloat16() for name, value in state.items()}, FOLDER / "half.pt")
    torch.save(views(state), FOLDER / "views.pt")
    torch.save(net.state_dict(), FOLDER / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(net, FOLDER / "module.pt")
    torch.jit.script(net).save(str(FOLDER / "script.pt"))


def views(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    flat = torch.cat([state[f"fc{i}.bias"] for i in (1, 2, 3)])
    biases = dict(zip(("fc1.bias", "fc2.bias", "fc3.bias"), flat.split([32, 16, 5]), strict=True))
    return {**state, **biases, "fc1.weight": state["fc1.weight"].t().contiguous().t()}


if __name__ == "__main__":
    main()
