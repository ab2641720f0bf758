"""Torch: one layer of experts; start it with `torchrun --nproc-per-node 4 torch_layer.py`."""

import torch

import tandem_ep

device = "cpu"  # or "cuda"

communicator = tandem_ep.Communicator.from_environment()  # torchrun's, mpirun's or srun's
buffer = tandem_ep.Buffer(communicator, backend=device, num_experts=8, max_tokens=128,
                          max_hidden=1024, max_topk=2)  # fmt: skip

torch.manual_seed(communicator.rank)
x = torch.randn(100, 1024, dtype=torch.bfloat16, device=device)  # this rank's tokens
topk_idx = torch.rand(100, 8, device=device).topk(2).indices
topk_weights = torch.rand(100, 2, device=device)

received = buffer.dispatch(x, topk_idx)  # received.x: [local experts, ranks * max_tokens, 1024]
y = buffer.next_combine_buffer(received.handle)  # peers read here; writing to it sends
for local, expert in enumerate(buffer.local_experts):
    count = received.counts[local]
    y[local, :count] = received.x[local, :count] * (expert + 1)  # your expert
out = buffer.combine(y, topk_weights, received.handle)

expected = x * ((topk_idx + 1) * topk_weights).sum(dim=1, keepdim=True)
error = (out - expected).abs().max() / expected.abs().max()
print(f"rank {communicator.rank}: ok, error {error:.3f} of the largest value, as bf16 has it")
