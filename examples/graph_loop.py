"""A decode loop whose step is one CUDA graph; on a CPU the same step runs eagerly.

python examples/graph_loop.py
"""

import torch

from fsbench.kernels import flash_sample

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
B, D, V = 4, 256, 5000
embedding = torch.randn(V, D, device=device, dtype=torch.bfloat16)  # in place of a model
weight = torch.randn(V, D, device=device, dtype=torch.bfloat16) / 8
seed = torch.arange(B, device=device)
token = torch.zeros(B, dtype=torch.int64, device=device)
position = torch.zeros(B, dtype=torch.int64, device=device)


def step() -> None:
    """Decode one token of each request; read and write the tensors above in place."""
    hidden = embedding[token]
    token.copy_(flash_sample(hidden, weight, seed=seed, offset=position).tokens)
    position.add_(1)  # on the device, so that each replay draws new noise


step()  # compiles the kernel and allocates its workspace, before the capture
replay = step
if device == "cuda":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()  # recorded, not run
    replay = graph.replay

for _ in range(5):
    replay()
    print(token.tolist())
assert position.tolist() == [6] * B
